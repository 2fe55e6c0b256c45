# SPDX-License-Identifier: Apache-2.0
"""A block pool whose blocks can be published and withdrawn while it is in use."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.elastic_kv.layout import ElasticKVLayout


@dataclass(frozen=True)
class BlockCounts:
    """Resident blocks by use. The null block belongs to none of the three, so
    `used + cached + free` is one less than the resident blocks.
    """

    used: int
    cached: int  # free, but still useful as a prefix
    free: int


@dataclass(frozen=True)
class ShrinkPlan:
    """Which chunks a shrink takes, and what that costs."""

    chunks: tuple[int, ...]
    evicted: int  # cached blocks that lose their prefix
    missing: int  # chunks that cannot be had, because they hold live blocks


class ElasticBlockPool(BlockPool):
    """Only resident blocks are in the free queue, in a request or in the prefix
    cache. `blocks` has an entry for every id up to the highest that was ever
    resident, so that an id is always its index; `num_gpu_blocks` counts the
    resident ones.
    """

    def __init__(self, layout: ElasticKVLayout, num_gpu_blocks: int, **kwargs: Any) -> None:
        super().__init__(num_gpu_blocks=num_gpu_blocks, **kwargs)
        self.layout = layout
        self._resident = set(range(num_gpu_blocks // layout.chunk_blocks))
        self._base_chunks = layout.base_blocks // layout.chunk_blocks

    @property
    def resident_chunks(self) -> frozenset[int]:
        return frozenset(self._resident)

    def missing_chunks(self) -> list[int]:
        """Chunks that are not resident, lowest first."""
        return [chunk for chunk in range(self.layout.capacity_chunks) if chunk not in self._resident]

    def counts(self) -> BlockCounts:
        cached = sum(block.block_hash is not None for block in self.free_block_queue.iter_blocks_after(None))
        free = self.get_num_free_blocks()
        return BlockCounts(used=self.num_gpu_blocks - 1 - free, cached=cached, free=free - cached)

    def grow(self, chunks: Sequence[int]) -> None:
        """Publish the blocks of `chunks`, which have pages on every rank by now.

        They are used before any cached block is evicted.
        """
        ids = [block_id for chunk in sorted(chunks) for block_id in self._ids(chunk)]
        if not ids:
            return
        assert len(set(chunks)) == len(chunks), f"a chunk is named twice in {chunks}"
        assert self._resident.isdisjoint(chunks), f"some of the chunks {chunks} are resident already"
        self.blocks.extend(KVCacheBlock(block_id, pool=self) for block_id in range(len(self.blocks), ids[-1] + 1))
        self._resident.update(chunks)
        self.free_block_queue.prepend_n([self.blocks[block_id] for block_id in ids])
        self.num_gpu_blocks += len(ids)

    def plan_shrink(self, num_chunks: int) -> ShrinkPlan:
        """Choose `num_chunks` chunks to withdraw, cheapest first: chunks that are
        free, then those whose cached blocks would be evicted next anyway. Changes
        nothing. Chunks of the base and chunks with a live block are never chosen.
        """
        candidates = {
            chunk: cached
            for chunk in sorted(self._resident, reverse=True)
            if chunk >= self._base_chunks and (cached := self._cached_in(chunk)) is not None
        }
        chosen = [chunk for chunk, cached in candidates.items() if not cached][:num_chunks]
        if len(chosen) < num_chunks:
            # A chunk is worth what its most useful block is worth: the one evicted last.
            worth = dict.fromkeys(candidates, -1)
            for place, block in enumerate(self.free_block_queue.iter_blocks_after(None)):
                chunk = block.block_id // self.layout.chunk_blocks
                if block.block_hash is not None and chunk in worth:
                    worth[chunk] = place
            rest = sorted((chunk for chunk in candidates if candidates[chunk]), key=worth.__getitem__)
            chosen += rest[: num_chunks - len(chosen)]
        return ShrinkPlan(
            chunks=tuple(sorted(chosen)),
            evicted=sum(candidates[chunk] for chunk in chosen),
            missing=num_chunks - len(chosen),
        )

    def shrink(self, plan: ShrinkPlan) -> None:
        """Withdraw the blocks of a plan that was made since the pool last changed.

        From here on nothing hands them out. Steps that are in flight may still
        write to them, so their pages have to stay until those steps are done.
        """
        for chunk in plan.chunks:
            assert chunk in self._resident, f"chunk {chunk} is not resident"
            assert self._cached_in(chunk) is not None, f"chunk {chunk} is in use"
        for chunk in plan.chunks:
            blocks = [self.blocks[block_id] for block_id in self._ids(chunk)]
            self._notify_reuse(blocks)
            for block in blocks:
                self._maybe_evict_cached_block(block)
                self.free_block_queue.remove(block)
            self._resident.remove(chunk)
            self.num_gpu_blocks -= len(blocks)

    def check(self) -> None:
        """Check the pool's invariants. Takes time in proportion to the blocks.

        Raises:
            AssertionError: One does not hold.

        """
        queued = self.free_block_queue.get_all_free_blocks()
        ids = {block.block_id for block in queued}
        resident = {block_id for chunk in self._resident for block_id in self._ids(chunk)}
        assert len(ids) == len(queued) == self.get_num_free_blocks(), "a block is queued twice, or miscounted"
        assert len(resident) == self.num_gpu_blocks, "resident blocks are miscounted"
        assert resident.issuperset(range(self.layout.base_blocks)), "a base block is not resident"
        assert ids <= resident, f"blocks without pages are in the free queue: {sorted(ids - resident)}"
        for index, block in enumerate(self.blocks):
            assert block.block_id == index, f"block {block.block_id} is at index {index}"
            if index not in resident:
                assert block.ref_cnt == 0, f"block {index} is in use without pages"
                assert block.block_hash is None, f"block {index} is a cached prefix without pages"
            elif not block.is_null:
                assert (block.ref_cnt == 0) == (index in ids), f"block {index} is neither free nor in use"
        assert resident.issuperset(self.cached_block_hashes_by_block), "a prefix names a block without pages"
        for entry in self.cached_block_hash_to_block._cache.values():
            prefixes = {entry.block_id: entry} if isinstance(entry, KVCacheBlock) else entry
            assert resident.issuperset(prefixes), f"a prefix names blocks without pages: {sorted(prefixes)}"
            assert all(block is self.blocks[index] for index, block in prefixes.items()), "a prefix names a stray block"

    def _ids(self, chunk: int) -> range:
        size = self.layout.chunk_blocks
        return range(chunk * size, (chunk + 1) * size)

    def _cached_in(self, chunk: int) -> int | None:
        """Cached blocks in the chunk, or None if one of its blocks is live."""
        cached = 0
        for block_id in self._ids(chunk):
            block = self.blocks[block_id]
            if block.ref_cnt or block.is_null:
                return None
            cached += block.block_hash is not None
        return cached
