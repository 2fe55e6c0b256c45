# SPDX-License-Identifier: Apache-2.0
"""What the kernels share: the formats as constants, where a row of the cache lies, and which positions a split has."""

import triton
import triton.language as tl

from .formats import Format

TENSOR = tl.constexpr(int(Format.TENSOR))
TOKEN_HEAD = tl.constexpr(int(Format.TOKEN_HEAD))
INT4 = tl.constexpr(int(Format.INT4))


@triton.jit
def offset_of(block, head, slot, strides, UNIT: tl.constexpr):
    """Where the row of a head at a position lies, int64. Strides are those of blocks, heads and positions, in UNITs.

    A stride has 32 bits where it fits, so that all is made wide before it is multiplied. Strides are multiplied by the
    unit, and not their sum: that would stay in a loop.
    """
    block_at = block.to(tl.int64) * (tl.cast(strides[0], tl.int64) * UNIT)
    slot_at = slot.to(tl.int64) * (tl.cast(strides[2], tl.int64) * UNIT)
    return block_at + slot_at + head.to(tl.int64) * (tl.cast(strides[1], tl.int64) * UNIT)


@triton.jit
def positions_of(low, high, split, TILE: tl.constexpr, SPLITS: tl.constexpr):
    """The positions of a split, from and up to, where all of them have those from `low` up to `high`. Splits meet
    where tiles do; some may have none.
    """
    tile_low = low // TILE
    tile_high = tl.cdiv(high, TILE)
    per_split = tl.cdiv(tl.maximum(tile_high - tile_low, 0), SPLITS)
    begin = tl.minimum(tile_low + split * per_split, tile_high)
    end = tl.minimum(begin + per_split, tile_high)
    return tl.maximum(low, begin * TILE), tl.minimum(high, end * TILE)
