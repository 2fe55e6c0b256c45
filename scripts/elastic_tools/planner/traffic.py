"""What a simulated engine is, what comes to it, and what came of it. Times are seconds, latencies ms."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from elastic_tools.planner.cache import IN_FLIGHT, KVLayout
from elastic_tools.planner.step import StepTimes


@dataclass(frozen=True)
class Loan:
    """An elastic reserve: ``blocks`` that the pool has on top while no step has more than ``tokens`` tokens of prompts.

    Taking them back pauses the engine for ``pause`` seconds. Where they hold live tokens they stay, and prompts run in
    chunks of ``tokens`` instead.
    """

    blocks: int
    tokens: int
    pause: float = 0.005


@dataclass(frozen=True)
class Engine:
    """What the simulated engine is: its speed, its pool, its limits. ``resizes`` are (second, blocks), in order."""

    times: StepTimes
    layout: KVLayout
    blocks: int
    chunk: int
    sequences: int
    resizes: tuple[tuple[float, int], ...] = ()
    loan: Loan | None = None

    def request_blocks(self, tokens: int) -> int:
        """Blocks that a request takes at most while its prompt is computed."""
        return self.layout.request_blocks(tokens, IN_FLIGHT * self.chunk)


@dataclass(eq=False)  # of equal requests each is itself
class Request:
    """One request. ``prompt`` grows by what was generated when it is preempted."""

    arrived: float
    prompt: int
    output: int
    done: int = 0  # tokens of the prompt that are computed
    made: int = 0  # tokens generated before the last preemption
    first: float | None = None
    begun: int = 0  # number of the decode step at which it began to decode
    ends: int = 0  # and at which it ends


@dataclass
class Outcome:
    """What came of a run. Latencies in ms; tokens are output tokens a second over the measured part."""

    tokens: float
    requests: float
    ttft: dict[str, float]
    tpot: dict[str, float]
    running: float
    preemptions: int
    steps: int
    refused: int = 0
    used: float = 0.0


@dataclass
class Counters:
    """What a run adds up: steps, preemptions, seconds of work, requests in it times seconds, the fullest cache."""

    steps: int = 0
    preemptions: int = 0
    busy: float = 0.0
    running: float = 0.0
    peak: float = 0.0
    finished: list[tuple[float, float, float, int]] = field(default_factory=list)  # end, ttft, tpot, tokens


def outcome(counters: Counters, refused: int, skip: int) -> Outcome:
    """The figures of a run. The start fills the batch and the end empties it, so ``skip`` requests at either end are
    left out, if there are enough.
    """
    ended = sorted(counters.finished)
    skip = min(len(ended) // 4, skip)
    begin = ended[skip - 1][0] if skip else 0.0
    measured = ended[skip : len(ended) - skip] if len(ended) > 2 * skip else ended
    span = (measured[-1][0] - begin) if measured else 0.0
    return Outcome(
        tokens=sum(each[3] for each in measured) / span if span else 0.0,
        requests=len(measured) / span if span else 0.0,
        ttft=_percentiles([each[1] * 1e3 for each in measured]),
        tpot=_percentiles([each[2] * 1e3 for each in measured if each[3] > 1]),
        running=counters.running / counters.busy if counters.busy else 0.0,
        preemptions=counters.preemptions,
        steps=counters.steps,
        refused=refused,
        used=counters.peak,
    )


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {"mean": 0.0, "p50": 0.0, "p90": 0.0, "p99": 0.0}
    p50, p90, p99 = np.percentile(values, [50, 90, 99])
    return {"mean": float(np.mean(values)), "p50": float(p50), "p90": float(p90), "p99": float(p99)}
