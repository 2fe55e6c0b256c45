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
def first_fault(row_ptr, first, last, resident_ptr, num_blocks, BLOCKS_PER_ENTRY: tl.constexpr, SCAN: tl.constexpr):
    """The first of the table entries from `first` up to `last` that must not be dereferenced, or `last`.

    SCAN entries are looked up at a time, one by each thread.
    """
    found = last
    at = first
    while at < found:
        entries = at + tl.arange(0, SCAN)
        wanted = entries < last
        ids = tl.load(row_ptr + entries, mask=wanted, other=0)
        ok = is_resident(ids, wanted, resident_ptr, num_blocks, BLOCKS_PER_ENTRY)
        found = tl.minimum(found, tl.min(tl.where(ok, last, entries), 0))
        at += SCAN
    return found
