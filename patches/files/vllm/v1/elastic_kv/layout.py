# SPDX-License-Identifier: Apache-2.0
"""How block ids lie in the cache's buffer, and which runs of them can be mapped."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import gcd, lcm
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from .arena import KVArena
    from .reserve import Reserve
    from .residency import Residency


@dataclass(frozen=True)
class Segment:
    """A contiguous run of the buffer in which block `b` takes the bytes from
    `offset + b * stride` to `offset + (b + 1) * stride`.
    """

    offset: int
    stride: int


@dataclass
class ElasticKVLayout:
    """Sizes of an elastic cache in blocks, equal on every rank. All but
    `chunk_blocks` are multiples of `chunk_blocks`.
    """

    base_blocks: int
    start_blocks: int
    capacity_blocks: int
    chunk_blocks: int
    driver: str
    # Resident while the engine warms up and captures graphs; what is then left tells how many more there can be.
    # None: as many as at the start.
    first_blocks: int | None = None
    # Blocks that share handles, at most; None: no limit, since handles can be cut.
    run_blocks: int | None = None
    # Released device memory that is kept at hand.
    keep_bytes: int = 0
    # What the rank's device had before the cache.
    available_bytes: int = field(default=0, compare=False)
    # Ranks that take their pages from the same memory, this one among them.
    ranks_sharing: int = 1
    # Memory that is kept for large steps beside the cache, where that was measured.
    reserve: "Reserve | None" = field(default=None, compare=False)
    # The rank's memory and what its kernels know of it, set where the worker allocates it; None in the engine core.
    arena: "KVArena | None" = field(default=None, repr=False, compare=False)
    residency: "Residency | None" = field(default=None, repr=False, compare=False)

    @property
    def capacity_chunks(self) -> int:
        return self.capacity_blocks // self.chunk_blocks


class TensorPlacement(Protocol):
    """The part of vLLM's `KVCacheTensor` that places layers in the buffer."""

    size: int
    layers: list[str]
    layer_stride: int
    block_stride: int
    offset: int


def segments_of(tensors: Iterable[TensorPlacement], num_blocks: int) -> list[Segment]:
    """The segments of a buffer that is laid out for `num_blocks` blocks.

    Layer-outermost layouts have one segment per layer, or one per layer and head
    where the heads come before the blocks. Block-outermost layouts have one in all.
    Cache groups that overlay each other share their segments.

    Raises:
        ValueError: The tensors do not tile the buffer with such segments.

    """
    tensors = list(tensors)
    size = tensors[0].size
    found: set[Segment] = set()
    for tensor in tensors:
        if tensor.block_stride * num_blocks == size:
            found.add(Segment(0, tensor.block_stride))
            continue
        span = tensor.block_stride * num_blocks
        if tensor.layer_stride % span:
            raise ValueError(
                f"layers {tensor.layers[0]}… lie {tensor.layer_stride} bytes apart, which is no multiple of "
                f"{num_blocks} blocks of {tensor.block_stride} bytes"
            )
        end = tensor.offset + tensor.layer_stride * len(tensor.layers)
        found.update(Segment(offset, tensor.block_stride) for offset in range(tensor.offset, end, span))
    segments = sorted(found, key=lambda segment: segment.offset)
    end = 0
    for segment in segments:
        if segment.offset != end:
            raise ValueError(f"the segment at byte {segment.offset} should begin at byte {end}")
        end += segment.stride * num_blocks
    if end != size:
        raise ValueError(f"the segments end at byte {end}, the buffer at byte {size}")
    return segments


def chunk_blocks_of(strides: Iterable[int], granule: int, capacity_blocks: int, max_mappings: int | None) -> int:
    """Blocks in a chunk: the smallest run whose bytes fill whole granules in every
    segment, or a multiple of it where `max_mappings` pieces would not reach.

    Args:
        strides: Bytes per block in each segment.
        granule: Bytes that the page driver can map at least.
        capacity_blocks: Blocks that the range shall have room for.
        max_mappings: Pieces that the page driver can cut the range into.

    """
    strides = list(strides)
    smallest = lcm(*(granule // gcd(granule, stride) for stride in strides))
    if max_mappings is None:
        return smallest
    chunks = max(1, max_mappings // len(strides))
    return smallest * max(1, -(-capacity_blocks // (smallest * chunks)))
