# SPDX-License-Identifier: Apache-2.0
"""Writes new keys and values into the cache, in its format."""

import torch
import triton
import triton.language as tl

from .addressing import INT4, TENSOR, TOKEN_HEAD, offset_of
from .formats import CacheViews
from .residency import is_resident

# Largest value, bits of the mantissa, smallest value above zero.
_ELEMENTS = {
    torch.int8: (127.0, 32, 1.0),
    torch.float8_e4m3fn: (448.0, 3, 2.0**-9),
    torch.float8_e4m3fnuz: (240.0, 3, 2.0**-10),
    torch.float8_e5m2: (57344.0, 2, 2.0**-16),
}


@triton.jit
def _round(x, MANTISSA: tl.constexpr, SMALLEST: tl.constexpr):
    """Round float32 half to even, to so many bits behind the first one and to multiples of SMALLEST.

    What is cast afterwards is exact, so that every device writes the same bytes. (The interpreter loses the carry
    into the exponent where a cast to fp8 has to round.)
    """
    exponent = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    unit = tl.maximum(exponent * (0.5**MANTISSA), SMALLEST)
    # Above 2^23 units float32 has no fractions left.
    large = unit * 12582912.0
    return (x + large) - large


@triton.jit
def _half_bits(x):
    return x.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF


@triton.jit
def _store_one(
    x_at,
    cache_at,
    scale_at,
    tensor_scale_ptr,
    FORMAT: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    LARGEST: tl.constexpr,
    MANTISSA: tl.constexpr,  # 32 in int8: every integer
    SMALLEST: tl.constexpr,
):
    """Quantise one head of one token and write it.

    Scales do not depend on how the work is cut, so that the same token gives the same bytes anywhere.
    """
    if FORMAT == INT4:
        dim = tl.arange(0, PADDED // 2)
        ok = dim < HEAD_SIZE // 2
        low = tl.load(x_at + dim, mask=ok, other=0.0).to(tl.float32)
        high = tl.load(x_at + HEAD_SIZE // 2 + dim, mask=ok, other=0.0).to(tl.float32)
        least = tl.min(tl.where(ok, tl.minimum(low, high), float("inf")), 0)
        most = tl.max(tl.where(ok, tl.maximum(low, high), float("-inf")), 0)
        # What the kernel will read is rounded to float16, so it is what we divide by.
        minimum = tl.clamp(least, -65504.0, 65504.0).to(tl.float16).to(tl.float32)
        step = tl.minimum((most - minimum) / 15, 65504.0).to(tl.float16).to(tl.float32)
        inverse = tl.where(step > 0, 1 / step, 0.0)
        low = _round(tl.clamp((low - minimum) * inverse, 0.0, 15.0), 32, 1.0).to(tl.int32)
        high = _round(tl.clamp((high - minimum) * inverse, 0.0, 15.0), 32, 1.0).to(tl.int32)
        tl.store(cache_at + dim, (low | (high << 4)).to(tl.uint8), mask=ok)
        tl.store(scale_at, _half_bits(step) | (_half_bits(minimum) << 16))
    else:
        dim = tl.arange(0, PADDED)
        ok = dim < HEAD_SIZE
        x = tl.load(x_at + dim, mask=ok, other=0.0)
        if FORMAT == TENSOR:
            x = x.to(tl.float32) / tl.load(tensor_scale_ptr)
        if FORMAT == TOKEN_HEAD:
            x = x.to(tl.float32)
            scale = tl.max(tl.abs(x), 0) / LARGEST
            x = x * tl.where(scale > 0, 1 / scale, 0.0)
            tl.store(scale_at, scale)
        if FORMAT >= TENSOR:
            x = _round(tl.clamp(x, -LARGEST, LARGEST), MANTISSA, SMALLEST)
        tl.store(cache_at + dim, x.to(cache_at.dtype.element_ty), mask=ok)


@triton.jit
def store_kernel(
    key_ptr,  # [tokens, kv_heads, head_size]
    value_ptr,
    k_ptr,  # [blocks, kv_heads, block_size, row]
    v_ptr,
    k_scale_ptr,  # of TENSOR: float32 [1]; of TOKEN_HEAD and INT4: [blocks, kv_heads, block_size]
    v_scale_ptr,
    slots_ptr,  # int64 [tokens], block id * block size + position in the block
    resident_ptr,  # uint8 [pool blocks], or None
    num_blocks,
    key_stride_token: tl.int64,
    key_stride_head: tl.int64,
    value_stride_token: tl.int64,
    value_stride_head: tl.int64,
    strides,  # of blocks, heads and positions
    scale_strides,
    FORMAT: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCKS_PER_ENTRY: tl.constexpr,
    LARGEST: tl.constexpr,
    MANTISSA: tl.constexpr,  # 32 in int8: every integer
    SMALLEST: tl.constexpr,
):
    """Grid: (tokens, kv_heads). A token whose block is not resident is not written."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    block = slot // BLOCK_SIZE
    if is_resident(block, slot >= 0, resident_ptr, num_blocks, BLOCKS_PER_ENTRY):
        at = offset_of(block, head, slot % BLOCK_SIZE, strides, 1)
        k_scale_at = k_scale_ptr
        v_scale_at = v_scale_ptr
        if FORMAT >= TOKEN_HEAD:
            scale_at = offset_of(block, head, slot % BLOCK_SIZE, scale_strides, 1)
            k_scale_at += scale_at
            v_scale_at += scale_at
        key_at = key_ptr + token * key_stride_token + head * key_stride_head
        value_at = value_ptr + token * value_stride_token + head * value_stride_head
        _store_one(key_at, k_ptr + at, k_scale_at, k_scale_ptr, FORMAT, HEAD_SIZE, PADDED, LARGEST, MANTISSA, SMALLEST)
        _store_one(
            value_at, v_ptr + at, v_scale_at, v_scale_ptr, FORMAT, HEAD_SIZE, PADDED, LARGEST, MANTISSA, SMALLEST
        )


def store(
    keys: torch.Tensor,
    values: torch.Tensor,
    cache: CacheViews,
    slots: torch.Tensor,
    resident: torch.Tensor | None,
    tensor_scales: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Write the keys and values of new tokens into the cache.

    Args:
        keys: `[tokens or more, kv_heads, head_size]`.
        values: As `keys`.
        cache: Of the layer.
        slots: int64 `[tokens]`. Negative ones are padding and are skipped.
        resident: uint8 `[pool blocks]`; tokens of other blocks are skipped. None: only the
            range is checked.
        tensor_scales: Of keys and values, float32, one element each, where the format is TENSOR.

    """
    num_blocks, kv_heads, block_size, _ = cache.keys.shape
    tokens = slots.shape[0]
    if tokens == 0:
        return
    largest, mantissa, smallest = _ELEMENTS.get(cache.keys.dtype, (0.0, 0, 0.0))
    k_scales, v_scales = cache.scales(tensor_scales)
    store_kernel[(tokens, kv_heads)](
        keys,
        values,
        cache.keys,
        cache.values,
        k_scales,
        v_scales,
        slots,
        resident,
        num_blocks,
        keys.stride(0),
        keys.stride(1),
        values.stride(0),
        values.stride(1),
        cache.keys.stride()[:3],
        cache.scale_strides,
        FORMAT=int(cache.format),
        HEAD_SIZE=cache.head_size,
        PADDED=triton.next_power_of_2(cache.head_size),
        BLOCK_SIZE=block_size,
        BLOCKS_PER_ENTRY=1 if resident is None else num_blocks // resident.shape[0],
        LARGEST=largest,
        MANTISSA=mantissa,
        SMALLEST=smallest,
        num_warps=1,
    )
