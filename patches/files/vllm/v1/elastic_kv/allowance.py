# SPDX-License-Identifier: Apache-2.0
"""How many blocks the cache may have now, and when the controller changes that many by itself.

The size that was asked for last is the allowed one. The cache is below it where
memory was short, or where the policy lets it grow when blocks are needed; then a step
that needs blocks makes it grow, before a cached prefix is evicted or a request
preempted. It is above it where a request could not go on otherwise, though it was the
only one, or where live blocks stopped a shrink; it comes back as soon as there is room.
"""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from vllm.utils.math_utils import cdiv
from vllm.v1.elastic_kv.block_pool import ElasticBlockPool

if TYPE_CHECKING:
    from vllm.v1.request import Request

# How long the controller waits to change the size by itself after it could not be changed, at first and at most.
RETRY_SECONDS = (1.0, 60.0)
# Growth for a step is by this part of the cache at least, if that is no more than a slice.
GROWTH_PART = 8


class Allowance:
    """The allowed size, and what follows from the difference between it and the real one."""

    def __init__(self, pool: ElasticBlockPool, blocks: int) -> None:
        self.blocks = blocks
        self._pool = pool
        self._retry_at = 0.0
        self._retry_after = RETRY_SECONDS[0]

    @property
    def exceeded(self) -> bool:
        """Whether there are more blocks than allowed, and could be less."""
        above = self._pool.num_gpu_blocks - self.blocks
        return 0 < above <= self._pool.get_num_free_blocks() and self._may_try()

    def set(self, blocks: int) -> None:
        """Allow another size, since somebody asked for it."""
        self.blocks = blocks
        self._retry_after = RETRY_SECONDS[0]

    def ended(self, done: bool) -> float:
        """After a change of size. Returns the seconds in which no other may be tried: none if it is done."""
        first, longest = RETRY_SECONDS
        wait = 0.0 if done else self._retry_after
        self._retry_at = time.monotonic() + wait
        self._retry_after = first if done else min(2 * self._retry_after, longest)
        return wait

    def growth(
        self, request: "Request", num_blocks: int, running: "Sequence[Request]", at_once: Callable[[], int]
    ) -> list[int]:
        """The chunks to attach now for a request that needs `num_blocks` blocks in this step.

        Args:
            request: Who needs them.
            num_blocks: How many.
            running: The requests that run; some of them may end and leave blocks.
            at_once: How many chunks can be attached without holding the step up for long.

        """
        pool, chunk_blocks = self._pool, self._pool.layout.chunk_blocks
        free = pool.get_num_free_blocks()
        lacking = num_blocks > free
        if pool.num_gpu_blocks >= self.blocks and not lacking:
            return []
        spare = (self.blocks - pool.num_gpu_blocks) // chunk_blocks
        if spare > 0:
            chunks = cdiv(num_blocks - pool.free_and_useless(num_blocks), chunk_blocks)
            # Some more than it takes now, so that a request that goes on growing does not do so for every block.
            more = min(pool.num_gpu_blocks // chunk_blocks // GROWTH_PART, at_once())
            chunks = min(max(chunks, more), spare) if chunks else 0
        elif lacking and all(other is request for other in running):
            # It is the only one, so nothing will come free: without growth it would wait for ever.
            chunks = cdiv(num_blocks - free, chunk_blocks)
        else:
            return []
        return pool.missing_chunks()[:chunks] if self._may_try() else []

    def _may_try(self) -> bool:
        return time.monotonic() >= self._retry_at
