"""What the requests are like: lengths, how many come, and how fast they have to be answered."""

from dataclasses import dataclass

import numpy as np

from elastic_tools.planner.errors import PlanError, positive

MOST_TOKENS = 2**24  # of a prompt or an answer; no model takes more
MOST_AT_A_TIME = 4096  # requests; four times what vLLM takes into a step by default, so most of them wait anyhow


@dataclass(frozen=True)
class Lengths:
    """A distribution of token counts: ``spread`` is 0 for a fixed length, else the sigma of a log-normal around
    ``median``.
    """

    median: int
    spread: float = 0.0

    def sample(self, rng: np.random.Generator, count: int, most: int) -> list[int]:
        """``count`` lengths between 1 and ``most``."""
        if not self.spread:
            return [min(self.median, most)] * count
        drawn = rng.lognormal(np.log(self.median), self.spread, count)
        return [int(n) for n in np.clip(np.rint(drawn), 1, most)]

    @property
    def mean(self) -> float:
        """The mean, without the cut at the top."""
        return float(self.median * np.exp(self.spread**2 / 2))


def parse_lengths(name: str, text: str) -> Lengths:
    """``1024``, or ``1024~0.5`` for a log-normal with this median and sigma."""
    median, tilde, spread = text.partition("~")
    try:
        result = Lengths(int(median), float(spread) if tilde else 0.0)
    except ValueError:
        raise PlanError(f"{name} is {text!r}, and must be tokens such as 1024, or 1024~0.5 for a spread.") from None
    if result.median < 1 or not 0 <= result.spread <= 3:
        raise PlanError(f"{name} is {text!r}: the tokens must be 1 or more, and the spread from 0 to 3.")
    if result.median > MOST_TOKENS:
        raise PlanError(f"{name} is {text!r}; the nearest that is planned for is {MOST_TOKENS}.")
    return result


@dataclass(frozen=True)
class Workload:
    """Requests.

    Either ``rate`` requests arrive in a second at random, or ``concurrency`` are in the system all the time, or
    neither is given and a plan takes as many as it can within the SLOs (``ttft`` and ``tpot``, in ms, at the 90th
    percentile; None for any).
    """

    prompt: Lengths
    output: Lengths
    rate: float | None = None
    concurrency: int | None = None
    ttft: float | None = None
    tpot: float | None = None

    def __post_init__(self) -> None:
        if self.rate is not None and self.concurrency is not None:
            raise PlanError("A rate and a concurrency were both given; give one of them.")
        for name, value in (
            ("rate", self.rate),
            ("concurrency", self.concurrency),
            ("TTFT", self.ttft),
            ("TPOT", self.tpot),
        ):
            if value is not None:
                positive(f"The {name}", value)
        if self.concurrency is not None and self.concurrency > MOST_AT_A_TIME:
            raise PlanError(
                f"A concurrency of {self.concurrency:,} is more than is simulated; the nearest is {MOST_AT_A_TIME}."
            )

    @property
    def length(self) -> int:
        """Tokens of a typical request at its end."""
        return round(self.prompt.mean) + round(self.output.mean)


WORKLOADS = {
    "chat": Workload(Lengths(1024), Lengths(256), ttft=1000, tpot=50),
    "document": Workload(Lengths(8192), Lengths(512), ttft=5000, tpot=80),
    "long": Workload(Lengths(32768), Lengths(512), ttft=20000, tpot=100),
}
