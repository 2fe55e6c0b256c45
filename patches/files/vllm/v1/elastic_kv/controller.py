# SPDX-License-Identifier: Apache-2.0
"""The one owner of the cache's size, in the engine core.

A resize is a transaction. It runs between steps, one at a time, as a generator
that yields what it waits for. While it waits, the engine goes on stepping.

The size that was asked for last is the allowed one. The cache is below it where
memory was short, or where the policy lets it grow when blocks are needed; then a step
that needs blocks makes it grow, before a cached prefix is evicted or a request
preempted. It is above it where a request could not go on otherwise, though it was the
only one, or where live blocks stopped a shrink; it comes back as soon as there is room.
"""

import time
from collections import Counter, deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from vllm.logger import init_logger
from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_utils import get_kv_cache_capacity
from vllm.v1.elastic_kv import worker_side
from vllm.v1.elastic_kv.block_pool import ElasticBlockPool
from vllm.v1.elastic_kv.resize import ResizeRequest, ResizeResult, explain
from vllm.v1.elastic_kv.resizer import Resizer, call
from vllm.v1.elastic_kv.stats import ElasticKVStats
from vllm.v1.elastic_kv.transaction import Job, Timer, Transaction, Waitable
from vllm.v1.elastic_kv.worker_side import RankState
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.core import EngineCore, EngineCoreProc

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = init_logger(__name__)

# Asking the ranks for what the system reports keeps them from computing: not more often than this.
MEASURE_SECONDS = 1.0
# How long the controller waits to change the size by itself after it could not be changed, at first and at most.
RETRY_SECONDS = (1.0, 60.0)
# Growth for a step is by this part of the cache at least, if that is no more than a slice.
GROWTH_PART = 8


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
        self._fatal: Exception | None = None
        call(engine.model_executor, worker_side.check).result()
        self._measured(call(engine.model_executor, worker_side.measure).result())
        self._block_bytes = max(rank["resident_bytes"] for rank in self._ranks) // pool.num_gpu_blocks
        self._resizer = Resizer(engine, pool, self._block_bytes, self._publish)
        assert self._config is not None
        on_demand = self._config.policy == "on-demand"
        self._allowed = pool.layout.capacity_blocks if on_demand else pool.num_gpu_blocks
        self._retry_at = 0.0
        self._retry_after = RETRY_SECONDS[0]
        # Tokens in a block, of a request that takes blocks from every cache group.
        self._block_tokens = engine.vllm_config.cache_config.block_size
        engine.scheduler.elastic_kv = self  # type: ignore[attr-defined]
        engine.scheduler.kv_cache_manager.elastic_kv = self  # type: ignore[attr-defined]
        self._show()

    @property
    def pending(self) -> bool:
        """Whether a transaction runs, or waits for its turn, or should."""
        return bool(self._queue) or self._above_allowed()

    @property
    def holds_steps(self) -> bool:
        """Whether no step may be scheduled now: a transaction waits for those in flight."""
        return bool(self._queue) and self._queue[0].holds_steps

    def resize(self, fields: dict[str, Any]) -> "Future[dict[str, Any]]":
        """Queue a resize, and begin it if no other one runs.

        Args:
            fields: What a `ResizeRequest` is made of.

        Returns:
            The answer, as `ResizeResult.to_dict` gives it, or `{"invalid": why}`
            where the request is malformed or asks for a size that the cache cannot
            have: the caller's mistake, which changes nothing.

        """
        answer: Future[dict[str, Any]] = Future()
        layout = self.pool.layout
        try:
            request = ResizeRequest.model_validate(fields)
            target = request.target_blocks(
                layout.capacity_blocks, layout.base_blocks, self._block_bytes, self._block_tokens
            )
        except ValueError as error:
            answer.set_result({"invalid": explain(error) if isinstance(error, ValidationError) else str(error)})
            return answer
        self._queue.append(self._job(request, target // layout.chunk_blocks * layout.chunk_blocks, answer))
        self.poll()
        return answer

    def poll(self, wait: bool = False) -> None:
        """Give the transactions their turn: one thing they wait for. The engine loop
        does so between two looks at its input, whether there is a step or not.

        Args:
            wait: Go on until all have ended. For callers without an engine loop.

        Raises:
            Exception: A transaction broke, and the engine cannot go on. Every
                later call raises the same, so that the engine loop meets it too.

        """
        if not self._queue and self._above_allowed():
            request = ResizeRequest(blocks=self._allowed, allow_preemption=False)
            self._queue.append(self._job(request, self._allowed, own=True))
        while self._queue:
            if self._fatal is not None:
                raise self._fatal
            try:
                moved = self._advance(self._queue[0], wait)
            except Exception as error:  # whatever it is, what the ranks hold is no longer known
                self._fatal = error
                raise
            if not wait or not moved:
                return

    def _advance(self, job: Job, wait: bool) -> bool:
        """Carry a transaction on to the next thing it waits for. False if it waits still."""
        value = None
        if job.run is None:
            job.run = self._run(job)
        elif job.waits_for is not None:
            if not wait and not job.waits_for.done() and self._has_steps(job.waits_for):
                return False
            value = job.waits_for.result()
        try:
            job.waits_for = job.run.send(value)
        except StopIteration as stop:
            self._queue.popleft()
            self._finish(job, stop.value)
        return True

    def make_room(self, request: "Request", num_blocks: int) -> None:
        """Grow, if that is allowed and helps, for a request that needs `num_blocks` blocks
        in the step that is being scheduled.

        Raises:
            Exception: The ranks could not be brought together again.

        """
        pool, layout = self.pool, self.pool.layout
        lacking = num_blocks > pool.get_num_free_blocks()
        if self._queue or (pool.num_gpu_blocks >= self._allowed and not lacking):
            return
        chunks = cdiv(num_blocks - pool.free_and_useless(num_blocks), layout.chunk_blocks)
        spare = (self._allowed - pool.num_gpu_blocks) // layout.chunk_blocks
        running = self._engine.scheduler.running  # type: ignore[attr-defined]
        if spare > 0:
            # Some more than it takes now, so that a request that goes on growing does not do so for every block.
            more = min(
                pool.num_gpu_blocks // layout.chunk_blocks // GROWTH_PART,
                self._resizer.in_a_slice(worker_side.attach),
            )
            chunks = min(max(chunks, more), spare) if chunks else 0
        elif lacking and all(other is request for other in running):
            # It is the only one, so nothing will come free: without growth it would wait for ever.
            chunks = cdiv(num_blocks - pool.get_num_free_blocks(), layout.chunk_blocks)
        else:
            return
        missing = pool.missing_chunks()[:chunks]
        if not missing or time.monotonic() < self._retry_at:
            return
        target = pool.num_gpu_blocks + len(missing) * layout.chunk_blocks
        job = self._job(ResizeRequest(blocks=target), target, own=True)
        self._resizer.grow_now(job, missing)
        self._measured_at = float("-inf")  # to be measured when somebody asks: the step waits
        self._finish(job, job.result)

    def state(self) -> dict[str, Any]:
        """The state as `GET /elastic_kv` gives it."""
        fresh = time.monotonic() - self._measured_at < MEASURE_SECONDS
        if not fresh and not self._engine.batch_queue and not self.pending:
            self._measured(call(self._engine.model_executor, worker_side.measure).result())
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
                "allowed": self._allowed,
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
                {name: rank[name] for name in ("rank", "resident_bytes", "reported_bytes", "handles")}
                for rank in self._ranks
            ],
            "transactions": dict(self._outcomes),
            "last": self._last,
        }

    def take_stats(self) -> ElasticKVStats:
        """What the metrics show; hands out each ended resize once."""
        resizes, self._unreported = self._unreported, []
        cache_config = self._engine.vllm_config.cache_config
        return ElasticKVStats(
            resident_blocks=self.pool.num_gpu_blocks,
            capacity_blocks=self.pool.layout.capacity_blocks,
            base_blocks=self.pool.layout.base_blocks,
            block_bytes=self._block_bytes,
            reported_bytes=max(rank["reported_bytes"] for rank in self._ranks),
            size_tokens=cache_config.kv_cache_size_tokens,
            max_concurrency=cache_config.kv_cache_max_concurrency,
            resizes=resizes,
        )

    def _run(self, job: Job) -> Transaction:
        job.result.before = job.result.after = self.pool.num_gpu_blocks
        if job.overdue:
            return job.end("refused", f"its turn did not come within {job.request.timeout_s:g} s")
        change = (job.target - self.pool.num_gpu_blocks) // self.pool.layout.chunk_blocks
        if job.request.dry_run:
            return (yield from self._resizer.foresee(job, change))
        self._allowed = job.target
        if not job.own:
            self._retry_after = RETRY_SECONDS[0]
        if change > 0:
            result = yield from self._resizer.grow(job, self.pool.missing_chunks()[:change])
        else:
            result = yield from self._resizer.shrink(job, -change)
        self._measured((yield from self._resizer.settle(job)))
        return result

    def _job(
        self, request: ResizeRequest, target: int, answer: "Future[dict[str, Any]] | None" = None, own: bool = False
    ) -> Job:
        now = self.pool.num_gpu_blocks
        result = ResizeResult("done", before=now, after=now)
        return Job(request, answer or Future(), time.monotonic(), result, target, own)

    def _above_allowed(self) -> bool:
        """Whether there are more blocks than allowed, and could be less."""
        above = self.pool.num_gpu_blocks - self._allowed
        return 0 < above <= self.pool.get_num_free_blocks() and time.monotonic() >= self._retry_at

    def _has_steps(self, waits_for: Waitable) -> bool:
        """Whether the engine has steps to do while a transaction waits. Without a step in
        flight nothing but the transaction itself would fetch the result of a call.
        """
        if self._engine.batch_queue:
            return True
        return isinstance(waits_for, Timer) and self._engine.scheduler.has_requests()

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

    def _measured(self, ranks: list[RankState]) -> None:
        self._ranks, self._measured_at = ranks, time.monotonic()

    def _finish(self, job: Job, result: ResizeResult) -> None:
        result.duration_ms = (time.monotonic() - job.asked_at) * 1000
        answer = result.to_dict()
        if not job.request.dry_run:
            self._back_off(result.outcome != "done")
            outcome = "failed" if job.rank_failed else result.outcome
            self._outcomes[outcome] += 1
            self._last = answer
            if self._engine.log_stats:
                direction = "shrink" if job.target < result.before else "grow"
                self._unreported.append(answer | {"outcome": outcome, "direction": direction})
            cache_config = self._engine.vllm_config.cache_config
            logger.info(
                "Elastic KV cache: resize from %d to %d blocks %s in %.1f ms (pause %.1f ms; blocks evicted: %d, "
                "moved: %d; requests preempted: %d)%s. "
                "KV cache size: %s tokens, maximum concurrency: %.2fx",
                result.before,
                result.after,
                result.outcome,
                result.duration_ms,
                result.pause_ms,
                result.evicted,
                result.moved,
                result.preempted,
                f": {result.reason}" if result.reason else "",
                f"{cache_config.kv_cache_size_tokens:,}",
                cache_config.kv_cache_max_concurrency,
            )
        job.answer.set_result(answer)
        self._show()

    def _back_off(self, failed: bool) -> None:
        """Let some time pass after a change of size that failed, before the controller tries again by itself."""
        first, longest = RETRY_SECONDS
        if failed:
            self._retry_at = time.monotonic() + self._retry_after
        self._retry_after = min(2 * self._retry_after, longest) if failed else first

    def _show(self) -> None:
        """Bring the front end's metrics up to date, which an idle engine does not do."""
        engine = self._engine
        if isinstance(engine, EngineCoreProc) and (stats := engine.scheduler.make_stats()) is not None:
            engine.output_queue.put_nowait((0, EngineCoreOutputs(scheduler_stats=stats)))
