# SPDX-License-Identifier: Apache-2.0
"""The guard of all kernels: which block ids may be dereferenced."""

import triton
import triton.language as tl

from .addressing import positions_of


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
def check_tables(
    limits_ptr,  # int32 [seqs, SPLITS]: up to which position a split may read
    faults_ptr,  # int32 [seqs], or None: count nothing
    table_ptr,  # int32 [seqs, …]
    seq_lens_ptr,  # int32 [seqs]
    query_start_ptr,  # int32 [seqs + 1]
    resident_ptr,  # uint8 [pool blocks], or None
    num_blocks,
    table_stride: tl.int64,
    BLOCK_SIZE: tl.constexpr,
    BLOCKS_PER_ENTRY: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    SPLITS: tl.constexpr,
    SCAN: tl.constexpr,  # table entries that are looked up at a time
):
    """Looks up the table entries that the attention kernel is going to use, and no others.

    Grid: (seqs, SPLITS). A split may read up to its first entry that must not be dereferenced. All such entries
    count, each once.
    """
    seq = tl.program_id(0)
    split = tl.program_id(1)
    query_len = tl.load(query_start_ptr + seq + 1) - tl.load(query_start_ptr + seq)
    seq_len = tl.load(seq_lens_ptr + seq)
    low = 0
    if WINDOW > 0:
        low = tl.maximum(seq_len - query_len - (WINDOW - 1), 0)
    high = tl.where(query_len > 0, tl.maximum(seq_len, 0), low)
    run_low, run_high = positions_of(low, high, split, TILE, SPLITS)
    first = run_low // BLOCK_SIZE
    last = tl.where(run_low < run_high, tl.cdiv(run_high, BLOCK_SIZE), first)
    # An entry in which the split before this one ends is counted there.
    mine = tl.where(split == 0, first, tl.cdiv(run_low, BLOCK_SIZE))

    lane = tl.arange(0, SCAN)
    found = tl.full([SCAN], 0, tl.int32) + last
    count = tl.zeros([SCAN], tl.int32)
    row_ptr = table_ptr + seq.to(tl.int64) * table_stride
    for at in range(first, last, SCAN):
        entries = at + lane
        wanted = entries < last
        ids = tl.load(row_ptr + entries, mask=wanted, other=0)
        fault = wanted & ~is_resident(ids, wanted, resident_ptr, num_blocks, BLOCKS_PER_ENTRY)
        found = tl.where(fault, tl.minimum(found, entries), found)
        count += (fault & (entries >= mine)).to(tl.int32)
    tl.store(limits_ptr + seq * SPLITS + split, tl.min(found, 0) * BLOCK_SIZE)
    if faults_ptr is not None:
        faults = tl.sum(count, 0)
        if faults > 0:
            tl.atomic_add(faults_ptr + seq, faults)
