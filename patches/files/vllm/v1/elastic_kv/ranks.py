# SPDX-License-Identifier: Apache-2.0
"""How something is done on every rank or on none, at once or while the engine goes on."""

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from vllm import envs
from vllm.v1.elastic_kv import worker_side
from vllm.v1.elastic_kv.transaction import Job, Timer, Waitable
from vllm.v1.elastic_kv.worker_side import RankReport

if TYPE_CHECKING:
    from vllm.v1.executor import Executor

T = TypeVar("T")
WorkerCall = Callable[[Any, Sequence[Any]], RankReport]

# Each slice shall hold the engine up for about this long; how many bytes that is, the slices
# before it tell.
SLICE_MS = 50.0
FIRST_SLICE_BYTES = 64 << 20
# Between looks at work that goes on in the background: at first, and at most.
LOOK_SECONDS = (0.002, 0.05)


class RanksDisagreeError(RuntimeError):
    """Ranks have different chunks attached, or different contents in them, and could
    not be brought together again.
    """


class Ranks:
    """The workers of an engine, as a transaction needs them."""

    def __init__(self, executor: "Executor", unit_bytes: Mapping[WorkerCall, int]) -> None:
        """
        Args:
            executor: Reaches the workers.
            unit_bytes: For what is done in slices: bytes of one of its units, such as a chunk that is attached.

        """
        self._executor = executor
        # How many units fit into a millisecond.
        self._pace = {do: FIRST_SLICE_BYTES / nbytes / SLICE_MS for do, nbytes in unit_bytes.items()}

    def in_a_slice(self, do: WorkerCall) -> int:
        """How many chunks, or blocks for `move`, a slice has."""
        return max(1, int(self._pace[do] * SLICE_MS))

    def at_once(self, job: Job, do: WorkerCall, undo: WorkerCall, what: Sequence[Any]) -> str | None:
        """Like `_on_all_ranks`, but the engine does nothing in between. Its time says how much the next may be."""
        before_ms = job.result.pause_ms
        error = _at_once(self._on_all_ranks(job, do, undo, what))
        if not error:
            pace = len(what) / max(job.result.pause_ms - before_ms, 0.001)
            self._pace[do] = min(4 * self._pace[do], pace)
        return error

    def aside(
        self, job: Job, begin: Callable[[Any, Sequence[int]], float], undo: WorkerCall, chunks: Sequence[int]
    ) -> Generator[Waitable, Any, str | None]:
        """Attach or detach on every rank, or on none, while the engine goes on. Returns why it was none."""
        job.result.pause_ms += max((yield call(self._executor, begin, chunks)))
        longest = envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS
        end = time.monotonic() + longest
        reports = yield from self.look(worker_side.ended, all, lambda: time.monotonic() > end)
        ended = [report for report in reports if report is not None]
        if len(ended) < len(reports):
            raise TimeoutError(
                f"{begin.__name__} of {len(chunks)} chunks has not ended on every rank after {longest} s"
            )
        return (yield from self._agree(job, ended, undo, chunks))

    def look(
        self, function: Callable[[Any], T], ended: Callable[[list[T]], bool], give_up: Callable[[], bool]
    ) -> Generator[Waitable, Any, list[T]]:
        """Look at what the ranks do in the background until it has `ended`. Returns what was seen last."""
        wait = LOOK_SECONDS[0]
        while True:
            seen: list[T] = yield call(self._executor, function)
            if ended(seen) or give_up():
                return seen
            yield Timer(wait)
            wait = min(2 * wait, LOOK_SECONDS[1])

    def _on_all_ranks(
        self, job: Job, do: WorkerCall, undo: WorkerCall, what: Sequence[Any]
    ) -> Generator[Waitable, Any, str | None]:
        """Do something on every rank, or on none. Returns why it was none."""
        reports: list[RankReport] = yield call(self._executor, do, what)
        job.result.pause_ms += max(report["elapsed_ms"] for report in reports)
        return (yield from self._agree(job, reports, undo, what))

    def _agree(
        self, job: Job, reports: Sequence[RankReport], undo: WorkerCall, what: Sequence[Any]
    ) -> Generator[Waitable, Any, str | None]:
        """Undo on the ranks that did something if others could not. Returns why they could not."""
        reason = reason_of(reports)
        if not reason:
            return None
        job.rank_failed = True
        done = [report["rank"] for report in reports if not report["error"]]
        if done:
            reports = yield call(self._executor, worker_side.on_ranks, undo, done, what)
            if still := reason_of(reports):
                raise RanksDisagreeError(f"{reason}; and it could not be undone on {still}")
        return reason


def call(executor: "Executor", function: Callable[..., T], *arguments: Any) -> "Future[list[T]]":
    """Call `function` on every worker, after the steps that are in flight there."""
    return executor.collective_rpc(
        function, timeout=envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS, args=arguments, non_block=True
    )


def _at_once(steps: Generator[Waitable, Any, T]) -> T:
    """Carry steps out without letting the engine do anything in between."""
    value: Any = None
    while True:
        try:
            value = steps.send(value).result()
        except StopIteration as stop:
            result: T = stop.value
            return result


def reason_of(reports: Sequence[RankReport]) -> str:
    """Which ranks failed, and why; empty if none did."""
    return "; ".join(f"rank {report['rank']}: {report['error']}" for report in reports if report["error"])
