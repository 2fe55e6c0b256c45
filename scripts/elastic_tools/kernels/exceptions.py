"""Where a bar of the gate is not met, by how much it may be missed, and why."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Exemption:
    """For one figure of one configuration on one target."""

    target: str
    case: str
    figure: str  # "spills" or "guard"
    limit: float
    reason: str


ANEW = "the guard is ahead of the loop, which the compiler allocates and schedules anew"
OUTSIDE = "outside of the loop over tiles"
LOOP = "some of them in the loop; no tile without them has been looked for"

EXEMPTIONS: tuple[Exemption, ...] = ()


def exemption(target: str, case: str, figure: str) -> Exemption | None:
    """What is exempt from a bar there, if anything is."""
    return next((e for e in EXEMPTIONS if (e.target, e.case, e.figure) == (target, case, figure)), None)
