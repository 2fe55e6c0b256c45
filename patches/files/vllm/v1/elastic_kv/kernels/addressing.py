# SPDX-License-Identifier: Apache-2.0
"""What the kernels that read and write the cache share: the formats as constants, and where a row lies."""

import triton
import triton.language as tl

from .formats import Format

TENSOR = tl.constexpr(int(Format.TENSOR))
TOKEN_HEAD = tl.constexpr(int(Format.TOKEN_HEAD))
INT4 = tl.constexpr(int(Format.INT4))


@triton.jit
def offset_of(block, head, slot, strides):
    """Where the row of a head at a position lies, int64, in units of the strides of blocks, heads and positions.

    A stride has 32 bits where it fits, so that what it is multiplied by has to be wide.
    """
    block_at = block.to(tl.int64) * strides[0]
    return block_at + head.to(tl.int64) * strides[1] + slot.to(tl.int64) * strides[2]
