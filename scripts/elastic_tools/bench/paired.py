"""Statistics of paired measurements."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

BOOTSTRAPS = 20_000


@dataclass(frozen=True)
class Ratio:
    """How an arm compares with the reference: the ratios of the rounds, summed up."""

    median: float
    quartiles: tuple[float, float]
    extremes: tuple[float, float]
    interval: tuple[float, float]  # 95% confidence interval of the median, by bootstrap
    rounds: list[float]

    def as_json(self) -> dict[str, object]:
        """For a report."""
        return asdict(self)

    def verdict(self, bar: float, more_is_better: bool) -> str:
        """Whether the loss is at most ``bar``: ``holds``, ``broken``, or ``undecided`` where the interval says neither.

        A gain never breaks the bar.
        """
        low, high = self.interval
        worst, best = (low, high) if more_is_better else (2 - high, 2 - low)
        if worst >= 1 - bar:
            return "holds"
        return "broken" if best < 1 - bar else "undecided"


def ratio(values: Sequence[float], reference: Sequence[float], seed: int = 0) -> Ratio:
    """Compares two arms that were measured in the same rounds."""
    rounds = np.asarray(values, dtype=float) / np.asarray(reference, dtype=float)
    draws = np.random.default_rng(seed).choice(rounds, size=(BOOTSTRAPS, rounds.size))
    low, high = np.quantile(np.median(draws, axis=1), [0.025, 0.975])
    first, middle, third = np.quantile(rounds, [0.25, 0.5, 0.75])
    return Ratio(
        median=float(middle),
        quartiles=(float(first), float(third)),
        extremes=(float(rounds.min()), float(rounds.max())),
        interval=(float(low), float(high)),
        rounds=[float(one) for one in rounds],
    )
