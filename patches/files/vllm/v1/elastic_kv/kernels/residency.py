# SPDX-License-Identifier: Apache-2.0
"""The guard of all kernels: which block ids may be dereferenced."""

import triton
import triton.language as tl


@triton.jit
def is_resident(ids, wanted, resident_ptr, num_blocks, BLOCKS_PER_ENTRY: tl.constexpr):
    """Whether blocks are wanted, inside the cache's range, and have memory behind them.

    Args:
        ids: Block ids, of any shape and integer type.
        wanted: Of the same shape; ids that are not wanted are looked up nowhere.
        resident_ptr: uint8, one entry for each block of the block pool, 0: no memory.
            None: all blocks inside the range have memory.
        num_blocks: Blocks that the range has room for.
        BLOCKS_PER_ENTRY: Kernel blocks in a block of the pool.

    """
    ok = wanted & (ids >= 0) & (ids < num_blocks)
    if resident_ptr is not None:
        ok = ok & (tl.load(resident_ptr + ids // BLOCKS_PER_ENTRY, mask=ok, other=0) != 0)
    return ok


@triton.jit
def find_faults(
    row_ptr, first, last, mine, resident_ptr, num_blocks, BLOCKS_PER_ENTRY: tl.constexpr, SCAN: tl.constexpr
):
    """The first of the table entries from `first` up to `last` that must not be dereferenced, or `last`; and how many
    such entries there are from `mine` on.

    SCAN entries are looked up at a time, one by each thread.
    """
    lane = tl.arange(0, SCAN)
    found = tl.full([SCAN], 0, tl.int32) + last
    count = tl.zeros([SCAN], tl.int32)
    for at in range(first, last, SCAN):
        entries = at + lane
        wanted = entries < last
        ids = tl.load(row_ptr + entries, mask=wanted, other=0)
        fault = wanted & ~is_resident(ids, wanted, resident_ptr, num_blocks, BLOCKS_PER_ENTRY)
        found = tl.where(fault, tl.minimum(found, entries), found)
        count += (fault & (entries >= mine)).to(tl.int32)
    return tl.min(found, 0), tl.sum(count, 0)
