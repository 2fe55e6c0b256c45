"""Blocks that have no memory behind them: they are never touched, and are counted. Where a kernel did touch one, this
process would die: detached blocks have no access rights here.
"""

import random

import pytest
import torch
from vllm.v1.elastic_kv.attention import counting_layer
from vllm.v1.elastic_kv.kernels.launch import Features, Guard, paged_attention
from vllm.v1.elastic_kv.kernels.move import move_blocks
from vllm.v1.elastic_kv.layout import Segment

from kernels.caches import TOLERANCE, UNUSED, Batch, Cache, Holes

PAGE = 4096


class HoledCache(Cache):
    """A cache whose blocks are pages of their own, each of which can be taken away and given back as NaN."""

    def __post_init__(self):
        self.block_stride = self.block_stride or 2 * PAGE
        self.holes = Holes(self.blocks * self.block_stride)
        self.buffer = self.holes.tensor
        super().__post_init__()
        self.resident.zero_()
        self.attach(range(self.blocks))

    def _span(self, block):
        used = self.heads * self.block_size * self.views.keys.stride(2) * self.views.keys.element_size()
        return block * self.block_stride, used

    def attach(self, blocks):
        for block in blocks:
            self.holes.open(*self._span(block))
            self.resident[block] = 1

    def detach(self, blocks):
        for block in blocks:
            self.resident[block] = 0
            self.holes.close(*self._span(block))


def live(batch, faulty, part=10**6):
    """For each sequence, which positions are attended to: in each part of so many that the work is cut into, those
    ahead of the first faulty block. faulty: (row, entry) pairs.
    """
    size, found = batch.cache.block_size, []
    for row, length in enumerate(batch.lengths):
        positions = torch.arange(length)
        ok = torch.tensor([(row, int(position) // size) not in faulty for position in positions], dtype=torch.bool)
        parts = [ok[start : start + part].int().cumprod(0).bool() for start in range(0, length, part)]
        found.append(torch.cat(parts))
    return found


@pytest.mark.parametrize(
    ("new", "splits", "block_size"),
    [(1, 1, 16), (1, 4, 16), (9, 1, 16), (1, 1, 64)],
    ids=["decode", "splits", "prefill", "large blocks"],
)
def test_the_table_is_not_read_beyond_the_length(new, splits, block_size):
    """The last entry in use is also the last of a page, and the next page must not be touched."""
    batch = Batch(Cache(heads=1, head_size=16, block_size=block_size), [40], [new])
    entries = -(-40 // block_size)
    holes = Holes(2 * PAGE)
    holes.open(0, PAGE)
    table = torch.as_strided(holes.tensor.view(torch.int32), (1, batch.table.shape[1]), (1, 1), PAGE // 4 - entries)
    table[:, :entries] = batch.table[:, :entries]
    batch.table = table
    batch.check(splits)
    batch.check(splits, Features(window=7))


@pytest.mark.parametrize("kind", ["unmapped", "negative", "beyond the capacity"])
@pytest.mark.parametrize(
    ("new", "splits"), [([1, 1], 1), ([1, 1], 4), ([5, 37], 1)], ids=["decode", "splits", "prefill"]
)
def test_stale_entries(kind, new, splits):
    """Of one sequence: three in the middle and the last. The other sequence is as it should be."""
    batch = Batch(HoledCache(blocks=16, heads=1), [40, 120], new)
    faulty = [(1, 1), (1, 4), (1, 5), (1, 7)]
    for number, at in enumerate(faulty):
        if kind == "unmapped":
            batch.cache.detach([int(batch.table[at])])
        else:
            batch.table[at] = (
                [-1, -(2**31), -7, -16][number] if kind == "negative" else [16, 17, 10**9, 2**31 - 1][number]
            )
    faults = torch.zeros(2, dtype=torch.int32)
    out = batch.run(splits, faults=faults)
    remain = live(batch, faulty, 32 if splits == 4 else 10**6)  # a tile for each split
    torch.testing.assert_close(out, batch.expected(live=remain), atol=TOLERANCE[torch.float32], rtol=0)
    assert faults.tolist() == [0, 4]
    batch.run(splits, faults=faults)
    assert faults.tolist() == [0, 8], "the counter is added to"


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("new", [1, 20], ids=["decode", "prefill"])
def test_one_stale_entry_counts_one(block_size, new):
    """Whichever it is, and however the work is cut; beyond the window it is not looked at."""
    for entry in (0, 6, 7) if block_size == 16 else (0, 1):
        cache = HoledCache(blocks=12, heads=1, block_size=block_size, head_size=16, block_stride=8 * PAGE)
        batch = Batch(cache, [120], [new])
        batch.table[0, entry] = UNUSED
        for splits, window in [(1, 0), (4, 0), (1, 20), (4, 20)]:
            faults = torch.zeros(1, dtype=torch.int32)
            batch.run(splits, Features(window), faults)
            seen = not window or (entry + 1) * block_size > 120 - new - window + 1
            assert faults.tolist() == [int(seen)], (entry, splits, window)


def test_no_resident_block():
    """Zero, and not NaN."""
    batch = Batch(HoledCache(), [40, 33], [1, 1])
    batch.cache.detach(batch.table[0, :3].tolist())
    faults = torch.zeros(2, dtype=torch.int32)
    out = batch.run(2, faults=faults)
    assert not out[0].any()
    assert faults.tolist() == [3, 0]


@pytest.mark.parametrize("name", ["int8", "int4", "fp8_e4m3"])
def test_stale_entry_in_quantised_caches(name):
    """Not even the scales of a missing block are read."""
    batch = Batch(HoledCache(name=name), [40, 33], [1, 1])
    batch.cache.detach([int(batch.table[0, 1])])
    faults = torch.zeros(2, dtype=torch.int32)
    torch.testing.assert_close(
        batch.run(faults=faults), batch.expected(live=live(batch, [(0, 1)])), atol=TOLERANCE[torch.float32], rtol=0
    )
    assert faults.tolist() == [1, 0]


def test_kernel_blocks_are_smaller_than_those_of_the_pool():
    """One entry of the map counts for several kernel blocks."""
    batch = Batch(HoledCache(blocks=12), [90], [1])
    resident = torch.ones(4, dtype=torch.uint8)  # three kernel blocks each
    resident[1] = 0
    batch.cache.resident = resident
    gone = [(0, entry) for entry in range(6) if batch.table[0, entry] // 3 == 1]
    assert gone
    batch.cache.holes.close(3 * 2 * PAGE, 3 * 2 * PAGE)
    faults = torch.zeros(1, dtype=torch.int32)
    out = batch.run(faults=faults)
    torch.testing.assert_close(out, batch.expected(live=live(batch, gone)), atol=TOLERANCE[torch.float32], rtol=0)
    assert faults.tolist() == [len(gone)]


@pytest.mark.parametrize("slot", [-1, 5 * 16 + 3, 12 * 16, 2**40], ids=["padding", "unmapped", "beyond", "far beyond"])
def test_nothing_is_stored_where_no_memory_is(slot):
    cache = HoledCache()
    cache.detach([5])
    keys = torch.ones(2, cache.heads, cache.head_size)
    cache.store(keys, keys, torch.tensor([slot, 7 * 16 + 2]))
    stored = [block for block in range(cache.blocks) if block != 5 and not cache.views.keys[block].isnan().all()]
    assert stored == [7]
    assert cache.views.keys[7].isnan().sum() == cache.views.keys[7].numel() - keys[0].numel()
    assert torch.equal(cache.views.values[7, :, 2], keys[1])


@pytest.mark.parametrize("name", ["native", "int4"])
def test_addresses_beyond_32_bits(name):
    """By strides: blocks that lie more than 2^31 elements apart, in memory of which almost nothing is there."""
    cache = HoledCache(blocks=6, name=name, block_stride=9 << 30)
    Batch(cache, [40, 30], [1, 1]).check(splits=2)
    Batch(cache, [40, 30], [4, 1], seed=1).check()


def test_move_blocks():
    """All bytes, in segments of different widths, and no others."""
    segments = [Segment(0, 96), Segment(96 * 8, 4096 + 8)]
    buffer = torch.randint(-128, 127, [8 * (96 + 4104)], dtype=torch.int8)
    expected = buffer.clone()
    for segment in segments:
        rows = torch.as_strided(expected, (8, segment.stride), (segment.stride, 1), segment.offset)
        rows[[6, 0]] = rows[[1, 3]]
    move_blocks(buffer, segments, [1, 3], [6, 0], 8)
    assert torch.equal(buffer, expected)


def test_move_blocks_by_bytes():
    """Strides that are no multiple of a word."""
    buffer = torch.arange(21, dtype=torch.int8)
    move_blocks(buffer, [Segment(0, 7)], [2], [0], 3)
    assert buffer.tolist() == [*range(14, 21), *range(7, 21)]


def test_nothing_moves_from_or_to_where_no_memory_is():
    cache = HoledCache()
    cache.detach([2, 3])
    before = cache.views.keys[[0, 1, 4, 5]].clone()
    segment = Segment(0, cache.block_stride)
    cache.holes.open(0, 2 * cache.block_stride)
    move_blocks(cache.buffer, [segment], [2, 0, 1], [0, 3, 12], cache.blocks, cache.resident)
    assert torch.equal(cache.views.keys[[0, 1, 4, 5]].isnan(), before.isnan())


def test_500_steps_of_resizes_moves_and_permutations():
    """Between decode steps blocks move, leave and come back as NaN, and the table is permuted. After each step the
    outputs are as they should be; after every fourth they are also those of a cache where nothing happens, to the bit.
    """
    rng = random.Random(0)
    lengths = [5, 17]
    fixed = Batch(Cache(blocks=8, heads=1, head_size=16), lengths, [1, 1], group=1, seed=3)
    cache = HoledCache(blocks=8, heads=1, head_size=16, block_stride=PAGE)
    moving = Batch(cache, lengths, [1, 1], group=1, seed=3)
    done = {"moved": 0, "detached": 0, "attached": 0}
    for step in range(500):
        _move_and_resize(moving, rng, done)
        # The sequences grow by a position, from 5 to 32 and again.
        for row in range(2):
            grown = lengths[row] + 1 if lengths[row] < 32 else 5
            lengths[row] = fixed.lengths[row] = moving.lengths[row] = grown
            if grown == 5:
                fixed.table[row, 1:] = moving.table[row, 1:] = UNUSED
        for batch in (fixed, moving):
            _write_last(batch, step)
        faults = torch.zeros(2, dtype=torch.int32)
        out = moving.run(faults=faults)
        torch.testing.assert_close(out, fixed.expected(), atol=TOLERANCE[torch.float32], rtol=0)
        assert step % 4 or torch.equal(out, fixed.run()), step
        assert not faults.any()
    assert all(count > 300 for count in done.values()), done


def _move_and_resize(batch, rng, done):
    """Move a block to a free one, and detach or attach about half of those that nothing uses."""
    cache = batch.cache
    used = [(row, entry) for row in range(2) for entry in range(-(-batch.lengths[row] // 16))]
    free = [b for b in range(8) if cache.resident[b] and b not in {int(batch.table[at]) for at in used}]
    if free:
        at, destination = rng.choice(used), rng.choice(free)
        cache.holes.open(destination * PAGE, PAGE)
        move_blocks(cache.buffer, [Segment(0, PAGE)], [int(batch.table[at])], [destination], 8, cache.resident)
        batch.table[at] = destination
        done["moved"] += 1
    in_use = {int(batch.table[at]) for at in used}
    for block in range(8):
        if block in in_use or rng.random() < 0.5:
            continue
        if cache.resident[block]:
            cache.detach([block])
            done["detached"] += 1
        else:
            cache.attach([block])
            done["attached"] += 1


def _write_last(batch, step):
    """New keys and values for the last position of every sequence, which may need a block."""
    rng = torch.Generator().manual_seed(step)
    keys, values = torch.randn(2, len(batch.lengths), 1, 16, generator=rng)
    slots = []
    for row, length in enumerate(batch.lengths):
        entry = (length - 1) // 16
        if batch.table[row, entry] == UNUSED:
            free = [b for b in range(8) if b not in batch.table[batch.table != UNUSED].tolist()]
            if isinstance(batch.cache, HoledCache):
                batch.cache.attach([b for b in free if not batch.cache.resident[b]][:1])
                free = [b for b in free if batch.cache.resident[b]]
            batch.table[row, entry] = free[0]
        slots.append(int(batch.table[row, entry]) * 16 + (length - 1) % 16)
        new = zip(batch.read[row], (keys, values), strict=True)
        batch.read[row] = [torch.cat([old[: length - 1], x[row : row + 1]]) for old, x in new]
    write = batch.cache.store if isinstance(batch.cache, HoledCache) else batch.cache.write
    write(keys, values, torch.tensor(slots))


def test_a_changed_map_is_seen_by_the_next_launch():
    """The kernels take pointers, and remember nothing: what a captured graph relies on."""
    batch = Batch(HoledCache(), [40], [1])
    out = torch.empty_like(batch.q)
    faults = torch.zeros(1, dtype=torch.int32)
    lengths = torch.tensor(batch.lengths, dtype=torch.int32)
    guard = Guard(batch.cache.resident, faults)

    def launch():
        paged_attention(batch.q, batch.cache.views, out, batch.table, lengths, batch.starts, 1, batch.scale, guard)
        return out.clone()

    before = launch()
    block = int(batch.table[0, 1])
    kept = batch.cache.buffer[block * 2 * PAGE : (block + 1) * 2 * PAGE].clone()
    batch.cache.detach([block])
    assert not torch.equal(launch(), before)
    assert faults.tolist() == [1]
    batch.cache.attach([block])
    batch.cache.buffer[block * 2 * PAGE : (block + 1) * 2 * PAGE].copy_(kept)
    assert torch.equal(launch(), before)
    assert faults.tolist() == [1]


@pytest.mark.parametrize(
    ("windows", "layer"),
    [
        ({"a": None, "b": None}, "a"),
        ({"a": 128, "b": None, "c": 128}, "b"),
        ({"a": 128, "b": 512}, "b"),
    ],
)
def test_faults_are_counted_by_the_layer_that_reads_most_of_the_table(windows, layer):
    """Without the hybrid cache manager one group has layers with and without a window."""
    assert counting_layer(windows) == layer
