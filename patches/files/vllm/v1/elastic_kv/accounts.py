# SPDX-License-Identifier: Apache-2.0
"""What is told of the cache: its state, its metrics, the log, and the numbers that upstream shows."""

import time
from collections import Counter
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import get_kv_cache_capacity
from vllm.v1.elastic_kv.block_pool import ElasticBlockPool
from vllm.v1.elastic_kv.stats import ElasticKVStats
from vllm.v1.elastic_kv.transaction import Job
from vllm.v1.elastic_kv.worker_side import RankState
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.core import EngineCore, EngineCoreProc

logger = init_logger(__name__)

# Asking the ranks for what the system reports keeps them from computing: not more often than this.
MEASURE_SECONDS = 1.0
# What `Lender.state` counts from the start on.
COUNTED_OF_RESERVE = ("reserve_returns", "smaller_steps")


class Accounts:
    """Remembers what the ranks held when they were last asked, and how resizes ended."""

    def __init__(self, engine: EngineCore, pool: ElasticBlockPool, ranks: list[RankState]) -> None:
        """Start with `ranks`, what each rank holds now."""
        self._engine = engine
        self._pool = pool
        self._outcomes: Counter[str] = Counter(done=0, partial=0, refused=0, failed=0)
        self._last: dict[str, Any] | None = None
        self._unreported: list[dict[str, Any]] = []
        self._unreported_faults = 0
        self._counted_of_reserve = dict.fromkeys(COUNTED_OF_RESERVE, 0)
        self.measured(ranks)
        # Of the rank where a block takes most.
        self.block_bytes = max(rank["resident_bytes"] for rank in ranks) // pool.num_gpu_blocks

    @property
    def stale(self) -> bool:
        """Whether it is time to ask the ranks again."""
        return time.monotonic() - self._measured_at >= MEASURE_SECONDS

    def measured(self, ranks: list[RankState]) -> None:
        """Take what the ranks hold now."""
        self._ranks, self._measured_at = ranks, time.monotonic()

    @property
    def late_bytes(self) -> int:
        """What a rank has detached and not given back to the device yet, at most."""
        return max(rank["unreleased_bytes"] for rank in self._ranks)

    def outdated(self) -> None:
        """The size has changed, and the ranks were not asked since: there was no time to."""
        self._measured_at = float("-inf")

    def state(
        self, policy: str, allowed: int, block_tokens: int, reserve: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The state as `GET /elastic_kv` gives it.

        Args:
            policy: Who decides the size.
            allowed: The blocks that the cache may have now.
            block_tokens: Tokens in a block.
            reserve: What the prefill reserve's lender tells, where there is one.

        """
        layout, counts = self._pool.layout, self._pool.counts()
        return {
            "policy": policy,
            "driver": layout.driver,
            "block_size": block_tokens,
            "chunk_blocks": layout.chunk_blocks,
            "blocks": {
                "base": layout.base_blocks,
                "resident": self._pool.num_gpu_blocks,
                "capacity": layout.capacity_blocks,
                "allowed": allowed,
                "used": counts.used,
                "cached": counts.cached,
                "free": counts.free,
            },
            "bytes": {
                "per_block": self.block_bytes,
                "resident": self._pool.num_gpu_blocks * self.block_bytes,
                "capacity": layout.capacity_blocks * self.block_bytes,
                "reported": self._reported_bytes,
            },
            "ranks": [
                {name: rank[name] for name in ("rank", "resident_bytes", "reported_bytes", "handles")}
                for rank in self._ranks
            ],
            "transactions": dict(self._outcomes),
            "last": self._last,
            "reserve": reserve,
        }

    def take_stats(self, reserve: dict[str, Any] | None = None) -> ElasticKVStats:
        """What the metrics show; hands out each ended resize, and all that is counted, once: only one of
        several API servers hears it.
        """
        if reserve is not None:
            counted = {name: reserve[name] for name in COUNTED_OF_RESERVE}
            reserve = reserve | {name: counted[name] - self._counted_of_reserve[name] for name in counted}
            self._counted_of_reserve = counted
        resizes, self._unreported = self._unreported, []
        faults, self._unreported_faults = self._unreported_faults, 0
        cache_config = self._engine.vllm_config.cache_config
        return ElasticKVStats(
            resident_blocks=self._pool.num_gpu_blocks,
            capacity_blocks=self._pool.layout.capacity_blocks,
            base_blocks=self._pool.layout.base_blocks,
            block_bytes=self.block_bytes,
            reported_bytes=self._reported_bytes,
            size_tokens=cache_config.kv_cache_size_tokens,
            max_concurrency=cache_config.kv_cache_max_concurrency,
            resizes=resizes,
            soft_page_faults=faults,
            reserve=reserve,
        )

    def faulted(self, count: int) -> None:
        """Count block ids without memory that a request named."""
        self._unreported_faults += count

    def publish(self, job: Job) -> None:
        """Make every number that upstream derives from the number of blocks follow it."""
        blocks = job.result.after = self._pool.num_gpu_blocks
        vllm_config, scheduler = self._engine.vllm_config, self._engine.scheduler
        manager = scheduler.kv_cache_manager  # type: ignore[attr-defined]
        cache_config, kv_cache_config = vllm_config.cache_config, manager.kv_cache_config
        kv_cache_config.num_blocks = cache_config.num_gpu_blocks = blocks
        manager.watermark_blocks = int(vllm_config.scheduler_config.watermark * blocks)
        cache_config.kv_cache_size_tokens, cache_config.kv_cache_max_concurrency = get_kv_cache_capacity(
            vllm_config, kv_cache_config
        )

    def ended(self, job: Job) -> dict[str, Any]:
        """Count and log a resize that has ended. Returns the answer to who asked for it."""
        result = job.result
        result.duration_ms = (time.monotonic() - job.asked_at) * 1000
        answer = result.to_dict()
        if job.request.dry_run:
            return answer
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
        return answer

    def show(self) -> None:
        """Bring the front end's metrics up to date, which an idle engine does not do."""
        engine = self._engine
        if isinstance(engine, EngineCoreProc) and (stats := engine.scheduler.make_stats()) is not None:
            engine.output_queue.put_nowait((0, EngineCoreOutputs(scheduler_stats=stats)))

    @property
    def _reported_bytes(self) -> int:
        return max(rank["reported_bytes"] for rank in self._ranks)
