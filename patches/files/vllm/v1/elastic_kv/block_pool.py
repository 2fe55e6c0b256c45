# SPDX-License-Identifier: Apache-2.0
"""A block pool whose blocks can be published and withdrawn while it is in use."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

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
    """Which chunks a shrink takes, and what that costs, in blocks."""

    chunks: tuple[int, ...]
    evicted: int  # cached blocks that lose their prefix
    moved: int  # live blocks that go to other chunks
    missing: int  # chunks that cannot be had, because live blocks need the room
    shortfall: int  # live blocks that would have to be freed for none to be missing


class Move(NamedTuple):
    """A live block that goes from one block id to another."""

    source: int
    destination: int


class ElasticBlockPool(BlockPool):
    """Only resident blocks are in the free queue, in a request or in the prefix
    cache. `blocks` has an entry for every id up to the highest that was ever
    resident, so that an id is always its index; `num_gpu_blocks` counts those
    that are handed out or may be.

    A chunk leaves in steps. `withdraw` takes its free blocks out, and from then on a
    block of it that is freed does not come back. Its live blocks trade ids with
    destinations that were set aside for them. An empty chunk may lose its pages,
    once no step is in flight that may touch them, and is then `retire`d.
    """

    def __init__(self, layout: ElasticKVLayout, num_gpu_blocks: int, **kwargs: Any) -> None:
        super().__init__(num_gpu_blocks=num_gpu_blocks, **kwargs)
        self.layout = layout
        self._resident = set(range(num_gpu_blocks // layout.chunk_blocks))
        self._base_chunks = layout.base_blocks // layout.chunk_blocks
        # Chunks that leave, and how many live blocks each has: looked at after every step, so they are counted.
        self._leaving: dict[int, int] = {}
        # As many as there are live blocks in leaving chunks; neither free nor in use.
        self._destinations: list[KVCacheBlock] = []

    @property
    def resident_chunks(self) -> frozenset[int]:
        """Chunks that have pages, those that are leaving among them."""
        return frozenset(self._resident)

    def missing_chunks(self) -> list[int]:
        """Chunks that are not resident, lowest first."""
        return [chunk for chunk in range(self.layout.capacity_chunks) if chunk not in self._resident]

    def counts(self) -> BlockCounts:
        cached = sum(block.block_hash is not None for block in self.free_block_queue.iter_blocks_after(None))
        free = self.get_num_free_blocks()
        return BlockCounts(used=self.num_gpu_blocks - 1 - free, cached=cached, free=free - cached)

    def free_and_useless(self, at_most: int) -> int:
        """How many of the next `at_most` blocks to be handed out are no cached prefix."""
        found = 0
        for block in islice(self.free_block_queue.iter_blocks_after(None), at_most):
            found += block.block_hash is None
        return found

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
        self._publish([self.blocks[block_id] for block_id in ids])

    def plan_shrink(self, num_chunks: int) -> ShrinkPlan:
        """Choose `num_chunks` chunks to withdraw, cheapest first: those that are free,
        those whose cached blocks would be evicted next anyway, then those with the
        fewest live blocks to move, as far as the live blocks fit into what stays.
        Changes nothing. Chunks of the base are never chosen.
        """
        assert not self._leaving, "another shrink is under way"
        size = self.layout.chunk_blocks
        # Requests wait for this, so the blocks are gone through once. While nothing leaves, what is not free is live.
        live = dict.fromkeys(self._resident, size)
        # A chunk is worth what its most useful block is worth: the one evicted last.
        worth = dict.fromkeys(self._resident, -1)
        for place, block in enumerate(self.free_block_queue.iter_blocks_after(None)):
            chunk = block.block_id // size
            live[chunk] -= 1
            if block.block_hash is not None:
                worth[chunk] = place
        room = self.get_num_free_blocks()
        leavable = len(self._resident) - self._base_chunks
        wanted = min(num_chunks, leavable)
        possible = min(wanted, room // size)
        candidates = [chunk for chunk in self._resident if chunk >= self._base_chunks]
        victims = sorted(candidates, key=lambda chunk: (live[chunk], worth[chunk], -chunk))[:possible]
        moved = sum(live[chunk] for chunk in victims)
        untouched = not moved and all(worth[chunk] < 0 for chunk in victims)
        return ShrinkPlan(
            chunks=tuple(sorted(victims)),
            evicted=0 if untouched else self._evicted_by(victims, moved),
            moved=moved,
            missing=num_chunks - possible,
            shortfall=max(0, wanted * size - room),
        )

    def withdraw(self, chunks: Sequence[int]) -> int:
        """Stop handing out the blocks of `chunks`, as a plan has them that was made
        since the pool last changed, and set destinations aside for the live ones.

        Returns:
            Cached blocks that were evicted.

        """
        assert not self._leaving, "another shrink is under way"
        assert self._resident.issuperset(chunks), f"some of the chunks {chunks} are not resident"
        assert all(chunk >= self._base_chunks for chunk in chunks), f"some of the chunks {chunks} are of the base"
        self._leaving = dict.fromkeys(chunks, 0)
        free, live = [], 0
        for chunk in chunks:
            for block_id in self._ids(chunk):
                block = self.blocks[block_id]
                if block.ref_cnt:
                    self._leaving[chunk] += 1
                    live += 1
                else:
                    self.free_block_queue.remove(block)
                    free.append(block)
        self.num_gpu_blocks -= len(free)
        self._destinations = self.free_block_queue.popleft_n(live)
        return self._evict(free) + self._evict(self._destinations)

    @property
    def leaving(self) -> bool:
        """Whether chunks are leaving."""
        return bool(self._leaving)

    def emptied(self) -> list[int]:
        """Leaving chunks in which no block is live, lowest first."""
        return sorted(chunk for chunk, live in self._leaving.items() if not live)

    def next_moves(self, at_most: int) -> list[Move]:
        """Moves that empty leaving chunks, those with the fewest live blocks first."""
        live = sorted((live, chunk) for chunk, live in self._leaving.items() if live)
        sources = [block for _, chunk in live for block in self._live_in(chunk)][:at_most]
        return [
            Move(source.block_id, destination.block_id)
            for source, destination in zip(sources, reversed(self._destinations), strict=False)
        ]

    def move(self, moves: Sequence[Move]) -> None:
        """Let live blocks trade ids with their destinations, after their contents were
        copied. Whoever holds a block, or several the same one, keeps the object:
        requests, prefix hashes and blocks that wait to be freed follow by themselves.
        """
        for source, destination in moves:
            block, other = self.blocks[source], self._destinations.pop()
            assert other.block_id == destination, f"block {destination} was not set aside"
            assert block.ref_cnt, f"block {source} is not in use"
            num_tokens = block.block_hash_num_tokens
            hashes = self._remove_cached_block_hashes(block)
            block.block_id, other.block_id = destination, source
            self._leaving[source // self.layout.chunk_blocks] -= 1
            self.blocks[destination], self.blocks[source] = block, other
            for block_hash in hashes:
                # The first one is the block's own; it alone has a number of tokens.
                self._insert_block_hash(block_hash, block, num_tokens=num_tokens)
            if self.metrics_collector and (metrics := self.metrics_collector.block_metrics.pop(source, None)):
                self.metrics_collector.block_metrics[destination] = metrics
        self.num_gpu_blocks -= len(moves)

    def retire(self, chunks: Sequence[int]) -> None:
        """Forget leaving chunks that were emptied; their pages are gone."""
        for chunk in chunks:
            live = self._leaving.pop(chunk)
            assert not live, f"chunk {chunk} is in use"
        self._resident.difference_update(chunks)

    def restore(self) -> None:
        """Publish again what is left of the leaving chunks."""
        blocks = [self.blocks[block_id] for chunk in sorted(self._leaving) for block_id in self._ids(chunk)]
        self.free_block_queue.prepend_n(self._destinations)
        self._destinations = []
        self._leaving = {}
        self._publish([block for block in blocks if not block.ref_cnt])

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """As upstream's, but blocks of leaving chunks do not come back."""
        if not self._leaving:
            return super().free_blocks(ordered_blocks)
        ordered_blocks = list(ordered_blocks)
        live = {block.block_id for block in ordered_blocks if block.ref_cnt and self._is_leaving(block)}
        super().free_blocks(ordered_blocks)
        gone = [self.blocks[block_id] for block_id in live if not self.blocks[block_id].ref_cnt]
        for block in gone:
            self.free_block_queue.remove(block)
            self._leaving[block.block_id // self.layout.chunk_blocks] -= 1
        self._evict(gone)
        self.num_gpu_blocks -= len(gone)
        # Their destinations are not needed any more.
        spare = len(self._destinations) - len(gone)
        self.free_block_queue.prepend_n(self._destinations[spare:])
        del self._destinations[spare:]

    def check(self) -> None:
        """Check the pool's invariants. Takes time in proportion to the blocks.

        Raises:
            AssertionError: One does not hold.

        """
        queued = self.free_block_queue.get_all_free_blocks()
        ids = {block.block_id for block in queued}
        spare = {block.block_id for block in self._destinations}
        pages = {block_id for chunk in self._resident for block_id in self._ids(chunk)}
        withdrawn = {
            block_id for chunk in self._leaving for block_id in self._ids(chunk) if not self.blocks[block_id].ref_cnt
        }
        resident = pages - withdrawn
        assert len(ids) == len(queued) == self.get_num_free_blocks(), "a block is queued twice, or miscounted"
        assert len(resident) == self.num_gpu_blocks, "resident blocks are miscounted"
        assert pages.issuperset(range(self.layout.base_blocks)), "a base block is not resident"
        assert ids <= resident, f"blocks without pages are in the free queue: {sorted(ids - resident)}"
        assert self._leaving.keys() <= self._resident, "a chunk that is leaving is not resident"
        for chunk, count in self._leaving.items():
            assert len(self._live_in(chunk)) == count, f"live blocks of chunk {chunk} are miscounted"
        assert spare.isdisjoint(ids), "a destination is in the free queue"
        assert not any(map(self._is_leaving, self._destinations)), "a destination is leaving"
        stranded = sum(self._leaving.values())
        assert len(spare) == stranded, f"{len(spare)} destinations are set aside for {stranded} live blocks"
        for index, block in enumerate(self.blocks):
            assert block.block_id == index, f"block {block.block_id} is at index {index}"
            if index not in resident or index in spare:
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

    def _is_leaving(self, block: KVCacheBlock) -> bool:
        return block.block_id // self.layout.chunk_blocks in self._leaving

    def _live_in(self, chunk: int) -> list[KVCacheBlock]:
        return [self.blocks[block_id] for block_id in self._ids(chunk) if self.blocks[block_id].ref_cnt]

    def _publish(self, blocks: list[KVCacheBlock]) -> None:
        self.free_block_queue.prepend_n(blocks)
        self.num_gpu_blocks += len(blocks)

    def _evict(self, blocks: Sequence[KVCacheBlock]) -> int:
        """Take the prefixes of free blocks away. Returns how many blocks had one."""
        if not self.metrics_collector:  # it is told of every block
            more = self.cached_block_hashes_by_block
            blocks = [block for block in blocks if block.block_hash is not None or block.block_id in more]
        return sum([self._maybe_evict_cached_block(block) for block in blocks])

    def _evicted_by(self, victims: Sequence[int], moved: int) -> int:
        """Cached blocks in `victims`, and among the destinations of `moved` blocks."""
        leaving, destinations, evicted = set(victims), 0, 0
        for block in self.free_block_queue.iter_blocks_after(None):
            if block.block_id // self.layout.chunk_blocks in leaving:
                evicted += block.block_hash is not None
            elif destinations < moved:
                destinations += 1
                evicted += block.block_hash is not None
        return evicted
