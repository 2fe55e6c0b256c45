# SPDX-License-Identifier: Apache-2.0
"""Launches the attention kernel and its guard: tile sizes, splits and scratch memory."""

from dataclasses import dataclass
from functools import cache as remember

import torch
import triton

from .attention import attend, reduce_splits
from .formats import CacheViews, Format
from .residency import check_tables

SCAN = 512  # table entries that the guard looks up at a time
MAX_SPLITS = 32


@dataclass(frozen=True)
class Tiles:
    """How a launch is cut: rows and positions of a tile, warps of a program, stages of the load pipeline."""

    rows: int
    positions: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Features:
    """What a layer's attention has beside softmax(q k) v."""

    window: int = 0  # positions that a query sees, itself among them; 0: all
    soft_cap: float = 0.0  # 0: none
    sinks: torch.Tensor | None = None  # [q_heads]
    slopes: torch.Tensor | None = None  # ALiBi, float32 [q_heads]


@dataclass(frozen=True)
class Guard:
    """What the kernels know of residency. Both tensors are read and written by pointer, so that a
    captured graph sees later changes.
    """

    resident: torch.Tensor | None = None  # uint8 [pool blocks]; None: only the range is checked
    faults: torch.Tensor | None = None  # int32 [seqs]: table entries without memory are added; None: not counted


@dataclass(frozen=True)
class Scratch:
    """Where the splits of a decode launch leave their parts."""

    parts: torch.Tensor  # float32 [tokens, q_heads, splits, padded head size]
    stats: torch.Tensor  # float32 [tokens, q_heads, splits, 2]

    @staticmethod
    def make(parts: int, head_size: int, device: torch.device) -> "Scratch":
        """Memory for launches of up to `parts` tokens times query heads times splits."""
        padded = triton.next_power_of_2(head_size)
        return Scratch(
            torch.empty(parts * padded, dtype=torch.float32, device=device),
            torch.empty(parts * 2, dtype=torch.float32, device=device),
        )


@remember
def capability_of(device: torch.device) -> int:
    """80 for sm_80, and so on; 0 where the device is not NVIDIA's."""
    if device.type != "cuda" or torch.version.hip:
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def tiles_for(head_size: int, group: int, itemsize: int, quantised: bool, decode: bool, capability: int) -> Tiles:
    """The default tiles, chosen so that registers do not spill (docs/results/kernels.md).

    Args:
        head_size: Elements of a head.
        group: Query heads of a KV head.
        itemsize: Bytes of a query element.
        quantised: Whether the cache is in another format than the queries: what is read is converted in registers.
        decode: Whether every sequence has one query.
        capability: Of the device, as `capability_of` has it.

    """
    padded = triton.next_power_of_2(head_size)
    wide = padded > 128
    least = max(16, triton.next_power_of_2(group))
    if itemsize == 4:
        return Tiles(least, 32, 4, 1)
    datacenter_blackwell = 100 <= capability < 120
    if decode:
        warps = 8 if padded == 128 and 80 <= capability < 90 else 4
        stages = 3 if wide and quantised and datacenter_blackwell else 2
        return Tiles(least, 32 if wide else 64, warps, stages)
    rows = max(least, 32 if wide and quantised else 64)
    warps = 8 if wide or (padded == 128 and (quantised or datacenter_blackwell)) else 4
    if capability == 0 and wide and quantised:
        stages = 1
    else:
        stages = 1 if capability >= 120 and padded != 128 and not quantised else 2
    return Tiles(rows, 32, warps, stages)


def splits_for(programs: int, multiprocessors: int) -> int:
    """Into how many parts the positions of each sequence are cut, so that `programs` programs
    fill the device twice. A power of 2. It depends on the batch alone, so that a captured graph keeps it.
    """
    wanted = max(1, 2 * multiprocessors // max(1, programs))
    return min(MAX_SPLITS, 1 << (wanted.bit_length() - 1))


def paged_attention(
    q: torch.Tensor,
    cache: CacheViews,
    out: torch.Tensor,
    table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start: torch.Tensor,
    max_query_len: int,
    scale: float,
    guard: Guard | None,
    *,
    features: Features = Features(),
    tensor_scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    splits: int = 1,
    scratch: Scratch | None = None,
    tiles: Tiles | None = None,
) -> None:
    """Causal attention of new tokens to the keys and values in the cache, their own among them.

    Args:
        q: `[tokens, q_heads, head_size]`.
        cache: Of the layer.
        out: As `q`. Rows that see no position become zero.
        table: int32 `[seqs, n]`, block ids. Read up to each sequence's length only.
        seq_lens: int32 `[seqs]`, positions in the cache.
        query_start: int32 `[seqs + 1]`, where the tokens of each sequence begin; its last
            tokens are the queries.
        max_query_len: Of any sequence.
        scale: Of the scores.
        guard: Which blocks may be read. None checks nothing, to measure what checking costs.
        features: Of the layer.
        tensor_scales: Of keys and values, float32, one element each, where the format is TENSOR.
        splits: Parts that the positions are cut into; a power of 2. Only where `max_query_len` is 1.
        scratch: Needed where there is more than one split.
        tiles: Instead of the default.

    """
    tokens, q_heads, head_size = q.shape
    num_blocks, kv_heads, block_size, _ = cache.keys.shape
    seqs = seq_lens.shape[0]
    if tokens == 0 or seqs == 0:
        return
    group = q_heads // kv_heads
    decode = max_query_len <= 1
    splits = splits if decode else 1
    quantised = cache.format is not Format.NATIVE
    tiles = tiles or tiles_for(head_size, group, q.element_size(), quantised, decode, capability_of(q.device))
    padded = triton.next_power_of_2(head_size)
    target, stats = out, None
    if splits > 1:
        assert scratch is not None
        target, stats = scratch.parts, scratch.stats
    if guard is None:
        limits = torch.full((seqs, splits), 2**31 - 1, dtype=torch.int32, device=q.device)
    else:
        limits = torch.empty(seqs, splits, dtype=torch.int32, device=q.device)
        check_tables[(seqs, splits)](
            limits,
            guard.faults,
            table,
            seq_lens,
            query_start,
            guard.resident,
            num_blocks,
            table.stride(0),
            BLOCK_SIZE=block_size,
            BLOCKS_PER_ENTRY=1 if guard.resident is None else num_blocks // guard.resident.shape[0],
            TILE=tiles.positions,
            WINDOW=features.window,
            SPLITS=splits,
            SCAN=SCAN,
        )
    k_scales, v_scales = cache.scales(tensor_scales)
    unit = cache.unit
    query_blocks = seqs if decode else tokens // (tiles.rows // group) + seqs
    attend[(query_blocks, kv_heads, splits)](
        target,
        stats,
        q,
        cache.keys,
        cache.value_offset // unit,
        k_scales,
        v_scales,
        table,
        seq_lens,
        query_start,
        limits,
        features.sinks,
        features.slopes,
        scale,
        features.soft_cap,
        seqs,
        table.stride(0),
        q.stride(0),
        q.stride(1),
        out.stride(0),
        out.stride(1),
        tuple(stride // unit for stride in cache.keys.stride()[:3]),
        cache.scale_strides,
        FORMAT=int(cache.format),
        UNIT=unit,
        HEAD_SIZE=head_size,
        PADDED=padded,
        BLOCK_SIZE=block_size,
        GROUP=group,
        BLOCK_M=tiles.rows,
        TILE=tiles.positions,
        WINDOW=features.window,
        SOFT_CAP=features.soft_cap > 0,
        DECODE=decode,
        SPLITS=splits,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    if splits > 1:
        reduce_splits[(tokens, q_heads)](
            out, target, stats, out.stride(0), out.stride(1), HEAD_SIZE=head_size, PADDED=padded, SPLITS=splits
        )
