# SPDX-License-Identifier: Apache-2.0
"""Copies whole blocks inside the cache, in one launch for all segments."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from vllm.v1.elastic_kv.layout import Segment


@triton.jit
def move_kernel(
    buffer_ptr,  # words
    moves_ptr,  # int64 [moves, 2], source and destination
    segments_ptr,  # int64 [segments, 2], offset and stride in words
    num_blocks,
    resident_ptr,  # uint8 [num_blocks], or None
    PIECE: tl.constexpr,  # words
):
    """Grid: (pieces of the largest stride, moves, segments). No move is made from or to a block without memory."""
    move = moves_ptr + tl.program_id(1) * 2
    source = tl.load(move)
    destination = tl.load(move + 1)
    ok = (source >= 0) & (source < num_blocks) & (destination >= 0) & (destination < num_blocks)
    if resident_ptr is not None:
        ok = ok & (tl.load(resident_ptr + source, mask=ok, other=0) != 0)
        ok = ok & (tl.load(resident_ptr + destination, mask=ok, other=0) != 0)
    if ok:
        segment = segments_ptr + tl.program_id(2) * 2
        offset = tl.load(segment)
        stride = tl.load(segment + 1)
        word = tl.program_id(0).to(tl.int64) * PIECE + tl.arange(0, PIECE)
        at = buffer_ptr + offset + word
        words = tl.load(at + source * stride, mask=word < stride)
        tl.store(at + destination * stride, words, mask=word < stride)


def move_blocks(
    buffer: torch.Tensor,
    segments: Sequence["Segment"],
    sources: Sequence[int],
    destinations: Sequence[int],
    num_blocks: int,
    resident: torch.Tensor | None = None,
) -> None:
    """Copy blocks, every byte of them in every segment.

    Args:
        buffer: int8, the cache's whole range.
        segments: How the blocks lie in it.
        sources: Block ids to copy from.
        destinations: Block ids to copy to, none of them among the sources.
        num_blocks: Blocks that the range has room for.
        resident: uint8 `[num_blocks]`, or None: only the range is checked.

    """
    numbers = [number for segment in segments for number in (segment.offset, segment.stride)]
    dtype = next(
        dtype
        for dtype in (torch.int64, torch.int32, torch.int16, torch.int8)
        if all(number % dtype.itemsize == 0 for number in numbers)
    )
    size = dtype.itemsize
    pieces = torch.tensor([[s.offset // size, s.stride // size] for s in segments], device=buffer.device)
    moves = torch.tensor(list(zip(sources, destinations, strict=True)), device=buffer.device)
    widest = max(segment.stride for segment in segments) // size
    piece = min(1024, triton.next_power_of_2(widest))
    grid = (triton.cdiv(widest, piece), len(sources), len(segments))
    move_kernel[grid](buffer.view(dtype), moves, pieces, num_blocks, resident, PIECE=piece)
