# SPDX-License-Identifier: Apache-2.0
"""How the cache grows and shrinks: the steps of a transaction, over all ranks.

- Grow: attach on all ranks; if one fails, detach on the others; publish the blocks.
- Shrink: withdraw the blocks; wait for the steps that were in flight, since they may
  still touch them; detach on all ranks; if one fails, attach again and publish.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from vllm import envs
from vllm.v1.elastic_kv import worker_side
from vllm.v1.elastic_kv.block_pool import ElasticBlockPool
from vllm.v1.elastic_kv.resize import Outcome
from vllm.v1.elastic_kv.transaction import Job, Pause, Transaction, Waitable
from vllm.v1.elastic_kv.worker_side import ProbeReport, RankReport

if TYPE_CHECKING:
    from vllm.v1.executor import Executor

T = TypeVar("T")
WorkerCall = Callable[[Any, Sequence[int]], RankReport]

# A resize is cut into slices, between which the engine steps. Each slice shall hold it up for about
# this long; how many bytes that is, the slices before it tell.
SLICE_MS = 50.0
FIRST_SLICE_BYTES = 64 << 20


class RanksDisagreeError(RuntimeError):
    """Ranks have different chunks attached, and could not be brought together again."""


class Resizer:
    """Changes which chunks are attached on all ranks and published in the pool."""

    def __init__(
        self,
        pool: ElasticBlockPool,
        executor: "Executor",
        block_bytes: int,
        fence: Callable[[], Waitable],
        publish: Callable[[Job], None],
    ) -> None:
        """
        Args:
            pool: Where blocks are published and withdrawn.
            executor: Reaches the workers.
            block_bytes: Bytes of a block on the rank where it takes most.
            fence: Makes what is done once the steps in flight are processed.
            publish: Called when the pool has another size.

        """
        self._pool = pool
        self._executor = executor
        self._block_bytes = block_bytes
        self._fence = fence
        self._publish = publish
        pace = FIRST_SLICE_BYTES / (block_bytes * pool.layout.chunk_blocks) / SLICE_MS
        self._chunks_per_ms: dict[WorkerCall, float] = {worker_side.attach: pace, worker_side.detach: pace}

    def foresee(self, job: Job, change: int) -> Transaction:
        """Tell what a change by so many chunks would come to, and do nothing."""
        chunk_blocks = self._pool.layout.chunk_blocks
        if change <= 0:
            plan = self._pool.plan_shrink(-change)
            job.result.evicted = plan.evicted
            job.result.after -= len(plan.chunks) * chunk_blocks
            return job.end(*_outcome_of_shrink(len(plan.chunks), plan.missing))
        probes: list[ProbeReport] = yield call(self._executor, worker_side.probe, self._pool.layout.driver)
        available = min(probe["available_bytes"] for probe in probes) // self._pool.layout.ranks_sharing
        fits = min(change, available // (self._block_bytes * chunk_blocks))
        job.result.after += fits * chunk_blocks
        if fits == change:
            return job.end("done")
        return job.end("partial" if fits else "refused", f"{available} bytes are available to each rank")

    def grow(self, job: Job, chunks: Sequence[int]) -> Transaction:
        """Attach `chunks` and publish their blocks, slice by slice."""
        for first, part in self._slices(worker_side.attach, chunks):
            error = f"not done within {job.request.timeout_s:g} s" if job.overdue else None
            error = error or (yield from self._on_all_ranks(job, worker_side.attach, worker_side.detach, part))
            if error:
                return job.end("partial" if first else "refused", error)
            with Pause(job):
                self._pool.grow(part)
                self._publish(job)
        return job.end("done")

    def shrink(self, job: Job, num_chunks: int) -> Transaction:
        """Withdraw the blocks of up to `num_chunks` chunks, and detach them."""
        with Pause(job):
            plan = self._pool.plan_shrink(num_chunks)
            self._pool.shrink(plan)
            self._publish(job)
            job.result.evicted = plan.evicted
        yield self._fence()
        # From here on the pages go, even if the caller's time is up: nothing uses them any more.
        for first, part in self._slices(worker_side.detach, plan.chunks):
            error = yield from self._on_all_ranks(job, worker_side.detach, worker_side.attach, part)
            if error:
                self._pool.grow(plan.chunks[first:])
                self._publish(job)
                return job.end("partial" if first else "refused", error)
        return job.end(*_outcome_of_shrink(len(plan.chunks), plan.missing))

    def _slices(self, do: WorkerCall, chunks: Sequence[int]) -> Iterator[tuple[int, Sequence[int]]]:
        first = 0
        while first < len(chunks):
            size = max(1, int(self._chunks_per_ms[do] * SLICE_MS))
            yield first, chunks[first : first + size]
            first += size

    def _on_all_ranks(
        self,
        job: Job,
        do: WorkerCall,
        undo: WorkerCall,
        chunks: Sequence[int],
    ) -> Generator[Waitable, Any, str | None]:
        """Do something to `chunks` on every rank, or on none. Returns why it was none."""
        reports: list[RankReport] = yield call(self._executor, do, chunks)
        elapsed_ms = max(report["elapsed_ms"] for report in reports)
        job.result.pause_ms += elapsed_ms
        failed = [f"rank {report['rank']}: {report['error']}" for report in reports if report["error"]]
        if not failed:
            pace = len(chunks) / max(elapsed_ms, 0.001)
            self._chunks_per_ms[do] = min(4 * self._chunks_per_ms[do], pace)
            return None
        reason = "; ".join(failed)
        job.rank_failed = True
        done = [report["rank"] for report in reports if not report["error"]]
        if done:
            reports = yield call(self._executor, worker_side.on_ranks, undo, done, chunks)
            still = [f"rank {report['rank']}: {report['error']}" for report in reports if report["error"]]
            if still:
                raise RanksDisagreeError(f"{reason}; and it could not be undone on {'; '.join(still)}")
        return reason


def call(executor: "Executor", function: Callable[..., T], *arguments: Any) -> "Future[list[T]]":
    """Call `function` on every worker, after the steps that are in flight there."""
    return executor.collective_rpc(
        function, timeout=envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS, args=arguments, non_block=True
    )


def _outcome_of_shrink(taken: int, missing: int) -> tuple[Outcome, str | None]:
    if not missing:
        return "done", None
    reason = f"{missing} chunks hold blocks that requests are using"
    return ("partial" if taken else "refused"), reason
