# SPDX-License-Identifier: Apache-2.0
"""The attention kernel over a paged KV cache, for decode in splits and for batches of any query lengths, and the
reduction of the splits. After FlashAttention-2 (arXiv 2307.08691) and Flash-Decoding.

Scores are kept in base 2, since exp2 is the one exponential that GPUs have.
"""

import triton
import triton.language as tl

from .addressing import INT4, TENSOR, TOKEN_HEAD, offset_of, positions_of

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _sequence_of(query_start_ptr, query_block, num_seqs, BLOCK_Q: tl.constexpr):
    """The sequence that a block of queries belongs to. Sequence s has the blocks from
    `query_start[s] // BLOCK_Q + s`: enough for its queries, whatever the lengths are.
    """
    low = 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start_ptr + middle) // BLOCK_Q + middle <= query_block:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _tanh(x):
    # One exponential of a negative number: no overflow on either side.
    e = tl.exp2(tl.abs(x) * (-2 * LOG2E))
    return tl.where(x < 0, e - 1, 1 - e) / (1 + e)


@triton.jit
def _unpack(words):
    """Step and minimum from the scale words of INT4."""
    step = (words & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    minimum = ((words >> 16) & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    return step, minimum


@triton.jit
def _dot(a, b):
    # Without this, float32 would be rounded to tf32.
    if a.dtype == tl.float32:
        return tl.dot(a, b, input_precision="ieee")
    return tl.dot(a, b)


@triton.jit
def attend(
    out_ptr,  # [tokens, q_heads, head_size]; with splits float32 [tokens, q_heads, SPLITS, PADDED] instead
    stats_ptr,  # with splits: float32 [tokens, q_heads, SPLITS, 2], maximum and sum
    q_ptr,  # [tokens, q_heads, head_size]
    k_ptr,  # [blocks, kv_heads, block_size, row]
    v_offset: tl.int64,  # from a key to its value; this and the strides of the cache are in units of UNIT elements
    k_scale_ptr,  # of TENSOR: float32 [1]; of TOKEN_HEAD and INT4: [blocks, kv_heads, block_size]
    v_scale_ptr,
    table_ptr,  # int32 [seqs, …]
    seq_lens_ptr,  # int32 [seqs]
    query_start_ptr,  # int32 [seqs + 1]
    limits_ptr,  # int32 [seqs, SPLITS]: up to which position a split may read
    sinks_ptr,  # [q_heads], or None
    slopes_ptr,  # float32 [q_heads], or None
    scale,
    soft_cap,
    num_seqs,
    table_stride: tl.int64,
    q_stride_token: tl.int64,
    q_stride_head: tl.int64,
    out_stride_token: tl.int64,
    out_stride_head: tl.int64,
    strides,  # of blocks, heads and positions
    scale_strides,
    FORMAT: tl.constexpr,
    UNIT: tl.constexpr,  # what the compiler cannot know otherwise, and needs in order to load more than a byte
    HEAD_SIZE: tl.constexpr,
    PADDED: tl.constexpr,  # the next power of 2
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a KV head
    BLOCK_M: tl.constexpr,  # rows: query tokens times query heads
    TILE: tl.constexpr,  # positions at a time
    WINDOW: tl.constexpr,  # 0: none
    SOFT_CAP: tl.constexpr,
    DECODE: tl.constexpr,  # each sequence has one query, or none
    SPLITS: tl.constexpr,
):
    """Grid: (blocks of queries, kv_heads, SPLITS).

    Table entries are read for the positions that the rows may see, and no others. `check_tables` has looked them up,
    and the limits are ahead of what must not be dereferenced. So no guard is in here.
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    query_block = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    if DECODE:
        seq = query_block
        first_query = 0
    else:
        seq = _sequence_of(query_start_ptr, query_block, num_seqs, BLOCK_Q)
        first_query = (query_block - tl.load(query_start_ptr + seq) // BLOCK_Q - seq) * BLOCK_Q
    start = tl.load(query_start_ptr + seq)
    query_len = tl.load(query_start_ptr + seq + 1) - start
    if first_query >= query_len:
        return
    seq_len = tl.load(seq_lens_ptr + seq)
    context = seq_len - query_len

    # [BLOCK_M] rows
    row = tl.arange(0, BLOCK_M)
    query = first_query + row // GROUP
    head = kv_head * GROUP + row % GROUP
    row_ok = (query < query_len) & (row < BLOCK_Q * GROUP)
    token = (start + query).to(tl.int64)
    q_pos = context + query

    # Positions that some row sees, those of this split
    high = tl.maximum(tl.minimum(seq_len, context + first_query + BLOCK_Q), 0)
    low = 0
    if WINDOW > 0:
        low = tl.maximum(context + first_query - (WINDOW - 1), 0)
    run_low, run_high = positions_of(low, high, split, TILE, SPLITS)
    # Not below `run_low`: a window may begin inside of a block. Then there is one tile, and nothing of it is live.
    run_high = tl.maximum(tl.minimum(run_high, tl.load(limits_ptr + seq * SPLITS + split)), run_low)
    row_ptr = table_ptr + seq.to(tl.int64) * table_stride

    # [BLOCK_M, WIDTH]: a head, or in INT4 one half of it and then the other
    WIDTH: tl.constexpr = PADDED // 2 if FORMAT == INT4 else PADDED
    USED: tl.constexpr = HEAD_SIZE // 2 if FORMAT == INT4 else HEAD_SIZE
    dim = tl.arange(0, WIDTH)
    dim_ok = dim < USED
    q_at = q_ptr + token[:, None] * q_stride_token + head[:, None] * q_stride_head + dim[None, :]
    q_ok = row_ok[:, None] & dim_ok[None, :]
    q = tl.load(q_at, mask=q_ok, other=0.0)
    acc = tl.zeros([BLOCK_M, WIDTH], dtype=tl.float32)
    if FORMAT == INT4:
        q_high = tl.load(q_at + USED, mask=q_ok, other=0.0)
        q_sum = tl.sum(q.to(tl.float32), 1) + tl.sum(q_high.to(tl.float32), 1)
        acc_high = tl.zeros([BLOCK_M, WIDTH], dtype=tl.float32)
        acc_all = tl.zeros([BLOCK_M], dtype=tl.float32)  # the same for all dimensions
    if FORMAT == TENSOR:
        scale *= tl.load(k_scale_ptr)
    if not SOFT_CAP:
        scale *= LOG2E

    m = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    if sinks_ptr is not None:
        if split == 0:
            m = tl.load(sinks_ptr + head, mask=row_ok, other=0.0).to(tl.float32) * LOG2E
            total += 1.0
    if slopes_ptr is not None:
        slope = tl.load(slopes_ptr + head, mask=row_ok, other=0.0) * LOG2E

    # [BLOCK_M] what each row sees of the run: `seen` positions from `seen_from` on
    seen_from = tl.full([BLOCK_M], 0, tl.int32) + run_low
    if WINDOW > 0:
        seen_from = tl.maximum(seen_from, q_pos - (WINDOW - 1))
    seen = tl.maximum(tl.minimum(run_high, q_pos + 1) - seen_from, 0).to(tl.uint32)
    for tile in range(run_low // TILE, tl.cdiv(run_high, TILE)):
        pos = tile * TILE + tl.arange(0, TILE)
        # One comparison for both ends of the run.
        live = (pos - run_low).to(tl.uint32) < (run_high - run_low).to(tl.uint32)
        # Neither is negative here, and a compiler that knows it needs fewer instructions to divide and to widen.
        place = pos.to(tl.uint32)
        if BLOCK_SIZE % TILE == 0:
            ids = tl.load(row_ptr + tile * TILE // BLOCK_SIZE).to(tl.uint32)
        else:
            ids = tl.load(row_ptr + place // BLOCK_SIZE, mask=live, other=0).to(tl.uint32)
        slot = place % BLOCK_SIZE
        at = offset_of(ids, kv_head, slot, strides, UNIT)[:, None] + dim[None, :]
        # What is not live may be unwritten or unmapped: it is not read, and counts as zero.
        tile_ok = live[:, None] & dim_ok[None, :]
        k = tl.load(k_ptr + at, mask=tile_ok, other=0.0)  # [TILE, WIDTH]
        v = tl.load(k_ptr + at + v_offset * UNIT, mask=tile_ok, other=0.0)
        if FORMAT >= TOKEN_HEAD:
            scale_at = offset_of(ids, kv_head, slot, scale_strides, 1)
            k_scales = tl.load(k_scale_ptr + scale_at, mask=live, other=0)  # [TILE]
            v_scales = tl.load(v_scale_ptr + scale_at, mask=live, other=0)

        # s: [BLOCK_M, TILE]
        if FORMAT == INT4:
            step, minimum = _unpack(k_scales)
            s = _dot(q, tl.trans((k & 15).to(q.dtype))) + _dot(q_high, tl.trans((k >> 4).to(q.dtype)))
            s = s * (step * scale)[None, :] + q_sum[:, None] * (minimum * scale)[None, :]
        else:
            s = _dot(q, tl.trans(k.to(q.dtype)))
            if FORMAT == TOKEN_HEAD:
                s *= (k_scales * scale)[None, :]
            else:
                s *= scale
        if SOFT_CAP:
            s = _tanh(s / soft_cap) * (soft_cap * LOG2E)
        if slopes_ptr is not None:
            s += slope[:, None] * (pos[None, :] - q_pos[:, None]).to(tl.float32)
        if DECODE:  # the run is what the one query sees
            visible = live[None, :]
        else:
            visible = (pos[None, :] - seen_from[:, None]).to(tl.uint32) < seen[:, None]
        s = tl.where(visible, s, float("-inf"))

        m_new = tl.maximum(m, tl.max(s, 1))
        # A row that has seen nothing yet: -inf - 0 and not -inf - -inf.
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(s - base[:, None])
        alpha = tl.exp2(m - base)
        m = m_new
        total = total * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        if FORMAT == INT4:
            step, minimum = _unpack(v_scales)
            acc_all = acc_all * alpha + tl.sum(p * minimum[None, :], 1)
            p = (p * step[None, :]).to(q.dtype)
            acc += _dot(p, (v & 15).to(q.dtype))
            acc_high = acc_high * alpha[:, None] + _dot(p, (v >> 4).to(q.dtype))
        else:
            if FORMAT == TOKEN_HEAD:
                p *= v_scales[None, :]
            acc += _dot(p.to(q.dtype), v.to(q.dtype))

    if FORMAT == INT4:
        acc += acc_all[:, None]
        acc_high += acc_all[:, None]
    if FORMAT == TENSOR:
        acc *= tl.load(v_scale_ptr)
    if SPLITS > 1:
        part = (token * (tl.num_programs(1) * GROUP) + head) * SPLITS + split
        out_at = out_ptr + part[:, None] * PADDED + dim[None, :]
        tl.store(stats_ptr + part * 2, m, mask=row_ok)
        tl.store(stats_ptr + part * 2 + 1, total, mask=row_ok)
    else:
        # A row that saw nothing is zero.
        inverse = 1 / tl.where(total > 0, total, 1.0)
        acc *= inverse[:, None]
        if FORMAT == INT4:
            acc_high *= inverse[:, None]
        out_at = out_ptr + token[:, None] * out_stride_token + head[:, None] * out_stride_head + dim[None, :]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=q_ok)
    if FORMAT == INT4:
        tl.store(out_at + USED, acc_high.to(out_ptr.dtype.element_ty), mask=q_ok)


@triton.jit
def reduce_splits(
    out_ptr,  # [tokens, q_heads, head_size]
    parts_ptr,  # float32 [tokens, q_heads, SPLITS, PADDED]
    stats_ptr,  # float32 [tokens, q_heads, SPLITS, 2]
    out_stride_token: tl.int64,
    out_stride_head: tl.int64,
    HEAD_SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Grid: (tokens, q_heads). Splits that saw nothing are not read."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    part = (token * tl.num_programs(1) + head) * SPLITS + tl.arange(0, SPLITS)
    m = tl.load(stats_ptr + part * 2)
    total = tl.load(stats_ptr + part * 2 + 1)
    some = total > 0
    top = tl.max(tl.where(some, m, float("-inf")), 0)
    weight = tl.where(some, tl.exp2(m - top), 0.0)
    dim = tl.arange(0, PADDED)
    ok = some[:, None] & (dim < HEAD_SIZE)[None, :]
    parts = tl.load(parts_ptr + part[:, None] * PADDED + dim[None, :], mask=ok, other=0.0)
    acc = tl.sum(parts * weight[:, None], 0)
    norm = tl.sum(tl.where(some, total, 0.0) * weight, 0)
    acc /= tl.where(norm > 0, norm, 1.0)
    out_at = out_ptr + token * out_stride_token + head * out_stride_head + dim
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=dim < HEAD_SIZE)
