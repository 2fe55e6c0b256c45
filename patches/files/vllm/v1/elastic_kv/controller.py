# SPDX-License-Identifier: Apache-2.0
"""The one owner of the cache's size, in the engine core.

A resize is a transaction. It runs between steps, one at a time, as a generator
that yields what it waits for:

- Grow: attach on all ranks; if one fails, detach on the others; publish the blocks.
- Shrink: withdraw the blocks; wait for the steps that were in flight, since they may
  still touch them; detach on all ranks; if one fails, attach again and publish.

While it waits, the engine goes on stepping.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from pydantic import ValidationError
from vllm import envs
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import get_kv_cache_capacity
from vllm.v1.elastic_kv import worker_side
from vllm.v1.elastic_kv.block_pool import ElasticBlockPool
from vllm.v1.elastic_kv.resize import Outcome, ResizeRequest, ResizeResult, explain
from vllm.v1.elastic_kv.stats import ElasticKVStats
from vllm.v1.elastic_kv.transaction import Fence, Job, Pause, RanksDisagreeError, Transaction, Waitable
from vllm.v1.elastic_kv.worker_side import RankReport, RankState
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.core import EngineCore, EngineCoreProc

logger = init_logger(__name__)

T = TypeVar("T")
WorkerCall = Callable[[Any, Sequence[int]], RankReport]

# A resize is cut into slices, between which the engine steps. Each slice shall hold it up for about
# this long; how many bytes that is, the slices before it tell.
SLICE_MS = 50.0
FIRST_SLICE_BYTES = 64 << 20


class ElasticKVController:
    """Resizes the KV cache of an engine core. Used from the engine's own thread only."""

    def __init__(self, engine: EngineCore) -> None:
        pool = engine.scheduler.kv_cache_manager.block_pool  # type: ignore[attr-defined]
        if not isinstance(pool, ElasticBlockPool):
            raise TypeError(
                f"The elastic KV cache needs its own block pool, but {type(engine.scheduler).__name__} "
                f"has a {type(pool).__name__}."
            )
        self.pool = pool
        self._engine = engine
        self._config = engine.vllm_config.elastic_kv_config
        self._queue: deque[Job] = deque()
        self._outcomes: Counter[str] = Counter(done=0, partial=0, refused=0, failed=0)
        self._last: dict[str, Any] | None = None
        self._unreported: list[dict[str, Any]] = []
        # Kept, so that the engine loop meets it too, where it ends the engine.
        self._fatal: RanksDisagreeError | None = None
        self._ranks: list[RankState] = self._call(worker_side.measure).result()
        self._block_bytes = max(rank["resident_bytes"] for rank in self._ranks) // pool.num_gpu_blocks
        chunk_bytes = self._block_bytes * pool.layout.chunk_blocks
        pace = FIRST_SLICE_BYTES / chunk_bytes / SLICE_MS
        self._chunks_per_ms: dict[WorkerCall, float] = {worker_side.attach: pace, worker_side.detach: pace}
        # Tokens in a block, of a request that takes blocks from every cache group.
        self._block_tokens = engine.vllm_config.cache_config.block_size

    @property
    def pending(self) -> bool:
        """Whether a transaction runs or waits for its turn."""
        return bool(self._queue) or self._fatal is not None

    def resize(self, fields: dict[str, Any]) -> "Future[dict[str, Any]]":
        """Like `submit`, but a request that cannot be taken is answered by
        `{"invalid": why}`: it is the caller's mistake, not the engine's failure.
        """
        try:
            return self.submit(fields)
        except ValueError as error:
            answer: Future[dict[str, Any]] = Future()
            answer.set_result({"invalid": explain(error) if isinstance(error, ValidationError) else str(error)})
            return answer

    def submit(self, fields: dict[str, Any]) -> "Future[dict[str, Any]]":
        """Queue a resize. The future holds the answer, as `ResizeResult.to_dict` gives it.

        Args:
            fields: What a `ResizeRequest` is made of.

        Raises:
            ValueError: The request is malformed, or asks for a size that the cache
                cannot have. Nothing is changed.

        """
        request = ResizeRequest.model_validate(fields)
        layout = self.pool.layout
        target = request.target_blocks(
            layout.capacity_blocks, layout.base_blocks, self._block_bytes, self._block_tokens
        )
        now = self.pool.num_gpu_blocks
        job = Job(
            request=request,
            answer=Future(),
            asked_at=time.monotonic(),
            result=ResizeResult("done", before=now, after=now),
            target=target // layout.chunk_blocks * layout.chunk_blocks,
        )
        self._queue.append(job)
        self.poll()
        return job.answer

    def poll(self, wait: bool = False) -> None:
        """Carry transactions on as far as they get without holding up a step.

        Args:
            wait: Wait for what they wait for, until all have ended. For callers
                without an engine loop.

        Raises:
            RanksDisagreeError: The engine cannot go on.

        """
        if self._fatal is not None:
            raise self._fatal
        while self._queue:
            job = self._queue[0]
            if job.run is None:
                job.run = self._run(job)
                value = None
            else:
                assert job.waits_for is not None
                # Only a step in flight can make waiting long; without one, wait.
                if not wait and self._engine.batch_queue and not job.waits_for.done():
                    return
                value = job.waits_for.result()
            try:
                job.waits_for = job.run.send(value)
            except StopIteration as stop:
                self._queue.popleft()
                self._finish(job, stop.value)
            except RanksDisagreeError as error:
                self._fatal = error
                raise

    def state(self) -> dict[str, Any]:
        """The state as `GET /elastic_kv` gives it."""
        if not self._engine.batch_queue and not self.pending:
            self._ranks = self._call(worker_side.measure).result()
        layout, counts = self.pool.layout, self.pool.counts()
        assert self._config is not None
        return {
            "policy": self._config.policy,
            "driver": layout.driver,
            "block_size": self._block_tokens,
            "chunk_blocks": layout.chunk_blocks,
            "blocks": {
                "base": layout.base_blocks,
                "resident": self.pool.num_gpu_blocks,
                "capacity": layout.capacity_blocks,
                "used": counts.used,
                "cached": counts.cached,
                "free": counts.free,
            },
            "bytes": {
                "per_block": self._block_bytes,
                "resident": self.pool.num_gpu_blocks * self._block_bytes,
                "capacity": layout.capacity_blocks * self._block_bytes,
                "reported": max(rank["reported_bytes"] for rank in self._ranks),
            },
            "ranks": [
                {name: rank[name] for name in ("rank", "resident_bytes", "reported_bytes", "handles")}  # type: ignore[literal-required]
                for rank in self._ranks
            ],
            "transactions": dict(self._outcomes),
            "last": self._last,
        }

    def take_stats(self) -> ElasticKVStats:
        """What the metrics show; hands out each ended resize once."""
        resizes, self._unreported = self._unreported, []
        return ElasticKVStats(
            resident_blocks=self.pool.num_gpu_blocks,
            capacity_blocks=self.pool.layout.capacity_blocks,
            base_blocks=self.pool.layout.base_blocks,
            block_bytes=self._block_bytes,
            reported_bytes=max(rank["reported_bytes"] for rank in self._ranks),
            resizes=resizes,
        )

    def _run(self, job: Job) -> Transaction:
        job.result.before = job.result.after = self.pool.num_gpu_blocks
        if job.overdue:
            return job.end("refused", f"its turn did not come within {job.request.timeout_s:g} s")
        change = (job.target - self.pool.num_gpu_blocks) // self.pool.layout.chunk_blocks
        if job.request.dry_run:
            return self._foresee(job, change)
        if change > 0:
            result = yield from self._grow(job, self.pool.missing_chunks()[:change])
        else:
            result = yield from self._shrink(job, -change)
        self._ranks = yield self._call(worker_side.measure)
        job.result.pause_ms += max(report["elapsed_ms"] for report in self._ranks)
        return result

    def _foresee(self, job: Job, change: int) -> ResizeResult:
        job.result.after = job.target
        if change >= 0:
            return job.end("done")
        plan = self.pool.plan_shrink(-change)
        job.result.evicted = plan.evicted
        job.result.after += plan.missing * self.pool.layout.chunk_blocks
        return job.end(*_outcome_of_shrink(len(plan.chunks), plan.missing))

    def _grow(self, job: Job, chunks: Sequence[int]) -> Transaction:
        for first, part in self._slices(worker_side.attach, chunks):
            error = f"not done within {job.request.timeout_s:g} s" if job.overdue else None
            error = error or (yield from self._on_all_ranks(job, worker_side.attach, worker_side.detach, part))
            if error:
                return job.end("partial" if first else "refused", error)
            with Pause(job):
                self.pool.grow(part)
                self._publish(job)
        return job.end("done")

    def _shrink(self, job: Job, num_chunks: int) -> Transaction:
        with Pause(job):
            plan = self.pool.plan_shrink(num_chunks)
            self.pool.shrink(plan)
            self._publish(job)
            job.result.evicted = plan.evicted
        yield Fence(self._engine)
        # From here on the pages go, even if the caller's time is up: nothing uses them any more.
        for first, part in self._slices(worker_side.detach, plan.chunks):
            error = yield from self._on_all_ranks(job, worker_side.detach, worker_side.attach, part)
            if error:
                self.pool.grow(plan.chunks[first:])
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
        reports: list[RankReport] = yield self._call(do, chunks)
        elapsed_ms = max(report["elapsed_ms"] for report in reports)
        job.result.pause_ms += elapsed_ms
        pace = self._chunks_per_ms[do]
        self._chunks_per_ms[do] = min(4 * pace, len(chunks) / max(elapsed_ms, 0.001))
        failed = [f"rank {report['rank']}: {report['error']}" for report in reports if report["error"]]
        if not failed:
            return None
        reason = "; ".join(failed)
        job.rank_failed = True
        done = [report["rank"] for report in reports if not report["error"]]
        if done:
            reports = yield self._call(worker_side.on_ranks, undo, done, chunks)
            still = [f"rank {report['rank']}: {report['error']}" for report in reports if report["error"]]
            if still:
                raise RanksDisagreeError(f"{reason}; and it could not be undone on {'; '.join(still)}")
        return reason

    def _call(self, function: Callable[..., T], *arguments: Any) -> "Future[list[T]]":
        """Call `function` on every worker, after the steps that are in flight there."""
        return self._engine.model_executor.collective_rpc(  # type: ignore[return-value, call-overload]
            function, timeout=envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS, args=arguments, non_block=True
        )

    def _publish(self, job: Job) -> None:
        """Make every number that upstream derives from the number of blocks follow it."""
        blocks = job.result.after = self.pool.num_gpu_blocks
        vllm_config, scheduler = self._engine.vllm_config, self._engine.scheduler
        manager = scheduler.kv_cache_manager  # type: ignore[attr-defined]
        cache_config, kv_cache_config = vllm_config.cache_config, manager.kv_cache_config
        kv_cache_config.num_blocks = cache_config.num_gpu_blocks = blocks
        manager.watermark_blocks = int(vllm_config.scheduler_config.watermark * blocks)
        cache_config.kv_cache_size_tokens, cache_config.kv_cache_max_concurrency = get_kv_cache_capacity(
            vllm_config, kv_cache_config
        )

    def _finish(self, job: Job, result: ResizeResult) -> None:
        result.duration_ms = (time.monotonic() - job.asked_at) * 1000
        answer = result.to_dict()
        if not job.request.dry_run:
            self._outcomes["failed" if job.rank_failed else result.outcome] += 1
            self._last = answer
            self._unreported.append(answer)
            cache_config = self._engine.vllm_config.cache_config
            logger.info(
                "Elastic KV cache: resize from %d to %d blocks %s in %.1f ms (pause %.1f ms, %d blocks evicted)%s. "
                "KV cache size: %s tokens, maximum concurrency: %.2fx",
                result.before,
                result.after,
                result.outcome,
                result.duration_ms,
                result.pause_ms,
                result.evicted,
                f": {result.reason}" if result.reason else "",
                f"{cache_config.kv_cache_size_tokens:,}",
                cache_config.kv_cache_max_concurrency,
            )
        job.answer.set_result(answer)
        self._show()

    def _show(self) -> None:
        """Bring the front end's metrics up to date, which an idle engine does not do."""
        engine = self._engine
        if isinstance(engine, EngineCoreProc) and (stats := engine.scheduler.make_stats()) is not None:
            engine.output_queue.put_nowait((0, EngineCoreOutputs(scheduler_stats=stats)))


def _outcome_of_shrink(taken: int, missing: int) -> tuple[Outcome, str | None]:
    if not missing:
        return "done", None
    reason = f"{missing} chunks hold blocks that requests are using"
    return ("partial" if taken else "refused"), reason
