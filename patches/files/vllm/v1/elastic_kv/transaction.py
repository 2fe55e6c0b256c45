# SPDX-License-Identifier: Apache-2.0
"""What a resize is made of while it runs."""

import time
from collections.abc import Generator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from vllm.v1.elastic_kv.resize import Outcome, ResizeRequest, ResizeResult

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCore


class Waitable(Protocol):
    """What a transaction waits for; a `concurrent.futures.Future` is one."""

    def done(self) -> bool: ...

    def result(self) -> Any: ...


class Fence:
    """Done once every step that was in flight when it was made has been processed."""

    def __init__(self, engine: "EngineCore") -> None:
        self._engine = engine
        self._steps = [step[0] for step in engine.batch_queue or ()]

    def done(self) -> bool:
        waiting = [step[0] for step in self._engine.batch_queue or ()]
        return not any(step is other for step in self._steps for other in waiting)

    def result(self) -> None:
        for step in self._steps:
            step.result()


class Timer:
    """Done after some time, in which the engine goes on."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def done(self) -> bool:
        return time.monotonic() >= self._end

    def result(self) -> None:
        time.sleep(max(0.0, self._end - time.monotonic()))


Transaction = Generator[Waitable, Any, ResizeResult]


@dataclass
class Job:
    """A transaction that runs or waits for its turn."""

    request: ResizeRequest
    answer: "Future[dict[str, Any]]"
    asked_at: float
    result: ResizeResult
    target: int
    # The controller's own idea: nobody waits for the answer.
    own: bool = False
    run: Transaction | None = None
    waits_for: Waitable | None = None
    rank_failed: bool = False
    # While set, no new step is scheduled: those in flight come to their end.
    holds_steps: bool = False
    # No new step is scheduled until it has ended.
    holds_all_steps: bool = False
    # It begins when the steps that are in flight have ended, which may need the memory that it takes.
    fenced: bool = False
    # Who wanted it does not any more: it ends as soon as it can.
    withdrawn: bool = False

    @property
    def overdue(self) -> bool:
        return time.monotonic() - self.asked_at > self.request.timeout_s

    @property
    def given_up(self) -> str | None:
        """Why it is not to go on, if it is not."""
        if self.withdrawn:
            return "a large prefill needs the memory"
        return f"not done within {self.request.timeout_s:g} s" if self.overdue else None

    def end(self, outcome: Outcome, reason: str | None = None) -> ResizeResult:
        self.result.outcome, self.result.reason = outcome, reason
        return self.result


class Pause:
    """Adds the time spent in its block to the job's pause."""

    def __init__(self, job: Job) -> None:
        self._result = job.result

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._result.pause_ms += (time.perf_counter() - self._start) * 1000
