"""What is resized, in which order, and what one resize gave."""

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

MIB = 2**20

Kind = Literal["free", "cached", "moves", "preemption"]
KINDS: tuple[Kind, ...] = get_args(Kind)
TITLES: dict[str, str] = {
    "grow": "grow",
    "free": "shrink, all free",
    "cached": "shrink, cached prefixes",
    "moves": "shrink, blocks have to move",
    "preemption": "shrink, requests have to go",
}


@dataclass(frozen=True)
class Case:
    """A shrink by so many bytes, from a cache in a certain state."""

    kind: Kind
    mib: int
    repeats: int


@dataclass(frozen=True)
class Settings:
    """How much is measured."""

    cases: tuple[Case, ...]
    decoders: int = 8  # requests that decode all the time
    floor_mib: int = 384  # what a shrink leaves: room for the decoders, and for blocks that move
    quiet_s: float = 2.0  # before each resize, to compare with


# To fill a GiB of this model's cache takes 23,000 tokens of prefill, a minute on two cores: once, then.
_GIB = {"free": 3, "cached": 1, "moves": 1, "preemption": 1}
FULL = Settings(
    (
        *(Case(kind, mib, 3) for mib in (64, 256) for kind in KINDS),
        *(Case(kind, 1024, _GIB[kind]) for kind in KINDS),
    )
)
QUICK = Settings((*(Case(kind, 64, 1) for kind in KINDS), Case("free", 256, 1)), quiet_s=1.0)


def order(settings: Settings) -> list[Case]:
    """All repeats of all cases, so that repeats of a case lie far apart and every second round goes backwards."""
    rounds = range(max(case.repeats for case in settings.cases))
    return [
        case for number in rounds for case in settings.cases[:: 1 if number % 2 == 0 else -1] if number < case.repeats
    ]


@dataclass
class Sample:
    """One resize. Gaps are those between two tokens of one client, in milliseconds."""

    what: str  # a kind, or "grow"
    mib: int
    answer: dict[str, Any]
    quiet_gaps_ms: list[float] = field(default_factory=list)  # just before
    gaps_ms: list[float] = field(default_factory=list)  # that the resize falls into

    @property
    def done_mib(self) -> float:
        """By how much the size changed, of what was wanted."""
        wanted: int = abs(self.answer["wanted"] - self.answer["from"])
        done: int = abs(self.answer["to"] - self.answer["from"])
        return self.mib * done / max(1, wanted)
