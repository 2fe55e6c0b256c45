"""How long one operator takes on one GPU, in milliseconds, and how that is known.

Measured: the shape is in the table. Interpolated: between shapes of the table, logarithm against logarithm. Modelled:
outside of the table, or a roofline with the efficiencies below. A table repeats one operator, so small operands can
stay in the L2 cache, which they cannot between the layers of a model; hence no time is below what the memory's
bandwidth allows.
"""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from elastic_tools.planner.cache import CacheDtype
from elastic_tools.planner.hardware import GPU
from elastic_tools.planner.tables import Array, Tables

BATCH: Array = np.array([2.0**n for n in range(12)])  # the axes of decode attention
CONTEXT: Array = np.array([2.0**n for n in range(19)])

# Shares of the data sheet that a roofline assumes.
STREAM = 0.92  # the most of its bandwidth that a GPU delivers
MEMORY, COMPUTE = 0.7, 0.6  # of a matrix product that was not measured
ATTENTION_MEMORY, ATTENTION_COMPUTE = 0.7, 0.45
EXPERT_MEMORY, EXPERT_COMPUTE = 0.55, 0.35
LAUNCH = 0.002  # ms that a small kernel takes at least inside a CUDA graph

# Time of decode attention with a cache format that was not measured, as a multiple of its time with a 16-bit cache.
# fp8 on an A100: the mean of what was measured on H100, H200 and L40S. Per-token-head formats: two pull requests of one
# author, whose tables name no GPU and have fp8 slower than 16 bit, as it is on none of the GPUs here. On the token
# time 38378 (merged) has -10% for int8 and +18% for fp8; 40633 (closed) has +7% for int8, +6% for fp8, +16% for int4.
# If attention is a quarter of that time, which is assumed, int8 is 0.60 to 1.28, fp8 1.25 to 1.72 and int4 1.65; the
# middle is taken. So these are the weakest figures of the planner.
# TurboQuant: pull request 38479 (Qwen3-4B on an H100, 80 at a time, 3 bit: 10.17 ms a token become 24.10, of which
# 16-bit attention is about 2) and 40858 (an H200: 7 times the time of fp8).
DEQUANTISATION = {
    "fp8": 0.7,
    "fp8_e4m3": 0.7,
    "fp8_e5m2": 0.7,
    "fp8_per_token_head": 1.49,
    "int8_per_token_head": 0.94,
    "int4_per_token_head": 1.65,
    "nvfp4": 0.5,
    "turboquant_k8v4": 8.0,
    "turboquant_4bit_nc": 8.0,
    "turboquant_k3v4_nc": 8.0,
    "turboquant_3bit_nc": 8.0,
}


class Source(IntEnum):
    """How a figure is known, from best to worst. The worst part of a sum is the source of the sum."""

    MEASURED = 0
    INTERPOLATED = 1
    MODELLED = 2


@dataclass(frozen=True)
class Timed:
    """Times in ms for a vector of sizes, and how they are known."""

    ms: Array
    source: Source


class Operators:
    """The operators of one GPU."""

    def __init__(self, gpu: GPU, tables: Tables) -> None:
        self.gpu = gpu
        self.arrays = tables.arrays

    def stream(self, size: float | Array, efficiency: float = STREAM) -> float | Array:
        """Time to read or write ``size`` bytes of memory, in ms."""
        return size / (self.gpu.bandwidth * efficiency) * 1e3

    # --- matrix products ---

    def gemm(self, tokens: Array, n: int, k: int, bits: float) -> Timed:
        """``tokens`` rows of ``k`` inputs to ``n`` outputs with weights of ``bits`` bits."""
        floor = self.stream(n * k * bits / 8)
        name = "gemm/bfloat16" if bits == 16 else "gemm/fp8"
        if bits not in (8, 16) or name not in self.arrays:
            return Timed(np.maximum(self._gemm_roofline(tokens, n, k, bits), floor), Source.MODELLED)
        grid, m_axis = self.arrays[name], self.arrays[f"{name}/m"]
        n_axis, k_axis = self.arrays[f"{name}/n"], self.arrays[f"{name}/k"]
        column, source = _bilinear(grid, n_axis, k_axis, n, k)
        if np.isnan(column).all():
            return Timed(np.maximum(self._gemm_roofline(tokens, n, k, bits), floor), Source.MODELLED)
        known = ~np.isnan(column)
        ms = _along(m_axis[known], column[known], tokens)
        if source is Source.MEASURED and not np.isin(tokens, m_axis[known]).all():
            source = Source.INTERPOLATED
        return Timed(np.maximum(ms, floor), source)

    def _gemm_roofline(self, tokens: Array, n: int, k: int, bits: float) -> Array:
        """Weight-only formats compute in 16 bit."""
        compute = 2 * tokens * n * k / (self.gpu.flops[16] * COMPUTE) * 1e3
        moved = n * k * bits / 8 + 2 * tokens * (n + k)
        return np.maximum(compute, self.stream(moved, MEMORY)) + LAUNCH

    def experts(self, tokens: Array, hidden: int, width: int, active: int, count: int, tp: int, bits: float) -> Timed:
        """The routed experts of one layer on one of ``tp`` ranks."""
        name = "moe/bfloat16" if bits == 16 else "moe/fp8"
        hit = count * (1 - (1 - active / count) ** tokens)  # experts that some token visits
        floor = self.stream(hit * 3 * hidden * width / tp * bits / 8)
        if bits in (8, 16):
            rows = self.arrays[name]
            wanted = (rows[:, :5] == np.array([hidden, width, active, count, tp])).all(axis=1)
            if wanted.any():
                known = rows[wanted]
                axis, first = np.unique(known[:, 5], return_index=True)
                ms = _along(axis, known[first, 6], tokens)
                source = Source.MEASURED if np.isin(tokens, axis).all() else Source.INTERPOLATED
                return Timed(np.maximum(ms, floor), source)
        compute = 2 * tokens * active * 3 * hidden * width / tp / (self.gpu.flops[16] * EXPERT_COMPUTE) * 1e3
        ms = np.maximum(compute, np.asarray(floor) * STREAM / EXPERT_MEMORY) + 10 * LAUNCH
        return Timed(ms, Source.MODELLED)

    def elementwise(self, size: Array, kernels: int) -> Timed:
        """Kernels that move ``size`` bytes in all: norms, rotary embedding, activation, cache writes."""
        return Timed(np.asarray(self.stream(size, 0.8)) + kernels * LAUNCH, Source.MODELLED)

    def all_reduce(self, elements: Array, tp: int) -> Timed:
        """The sum of a 16-bit tensor over ``tp`` ranks, as vLLM does it inside a CUDA graph."""
        if tp == 1:
            return Timed(np.zeros_like(elements), Source.MEASURED)
        axis = self.arrays["allreduce/message_size"]
        ranks = self.arrays["allreduce/num_gpus"]
        if tp in ranks:
            return Timed(_along(axis, self.arrays["allreduce"][list(ranks).index(tp)], elements), Source.INTERPOLATED)
        # Beyond one node of eight the slower link counts twice; the planner stays within a node, and says so elsewhere.
        return Timed(2 * _along(axis, self.arrays["allreduce"][-1], elements), Source.MODELLED)

    # --- attention ---

    def prefill(self, lengths: Array, heads: int, kv_heads: int, dim: int) -> Timed:
        """Causal attention of one sequence of each length over itself, one layer, 16-bit cache."""
        name, axis_names = f"context/{dim}/bfloat16", ("num_heads", "num_key_value_heads", "isl")
        compute = 2 * lengths**2 * heads * dim
        model = compute / (self.gpu.flops[16] * ATTENTION_COMPUTE) * 1e3 + 5 * LAUNCH
        if name not in self.arrays:
            return Timed(model, Source.MODELLED)
        grid, (h_axis, kv_axis, axis) = self.arrays[name], [self.arrays[f"{name}/{each}"] for each in axis_names]
        if kv_heads not in kv_axis:
            return Timed(model, Source.MODELLED)
        line, source = _heads(grid[:, list(kv_axis).index(kv_heads)], h_axis, heads)
        known = ~np.isnan(line)
        if known.sum() < 2:
            return Timed(model, Source.MODELLED)
        ms = _along(axis[known], line[known], lengths, power=2.0)
        return Timed(ms, max(source, Source.INTERPOLATED))

    def decode(
        self, dtype: CacheDtype, heads: int, kv_heads: int, dim: int, ideal: bool = False
    ) -> tuple[Array, Source]:
        """Decode attention of one layer: a grid [batch, context] of times, on axes that are powers of two.

        ``ideal`` takes a compressed cache to cost what its bytes cost, as if dequantisation were free.
        """
        measured = "fp8" if dtype.name in ("fp8", "fp8_e4m3") else "bfloat16"
        if f"decode/{dim}/{measured}" not in self.arrays:
            measured = "bfloat16"
        grid, source = self._decode_grid(f"decode/{dim}/{measured}", heads, kv_heads, dim)
        tokens = BATCH[:, None] * CONTEXT[None, :] * kv_heads
        base = np.maximum(grid, np.asarray(self.stream(tokens * 4 * dim)))
        if dtype.content is None or dtype.bits == 16:
            return base, source
        size = dtype.content(dim)
        floor = np.asarray(self.stream(tokens * size))
        if measured == "fp8":
            return np.maximum(grid, floor), source
        factor = size / (4 * dim) if ideal else DEQUANTISATION[dtype.name]
        start = base[:, :1]  # what a call costs whatever the context
        return np.maximum(start + (base - start) * factor, floor), Source.MODELLED

    def _decode_grid(self, name: str, heads: int, kv_heads: int, dim: int) -> tuple[Array, Source]:
        batch, context = BATCH, CONTEXT
        size = batch[:, None] * context[None, :] * kv_heads * 4 * dim
        model = np.asarray(self.stream(size, ATTENTION_MEMORY)) + 5 * LAUNCH
        if name not in self.arrays:
            return model, Source.MODELLED
        axes = [self.arrays[f"{name}/{axis}"] for axis in ("num_heads", "num_key_value_heads", "batch_size", "step")]
        fold = 1
        if kv_heads not in axes[1]:  # more KV heads than were measured: heads are as independent as requests are
            fold = next((f for f in (2, 3, 4, 5, 6, 8, 10, 16) if kv_heads / f in axes[1]), 0)
            if not fold:
                return model, Source.MODELLED
        grid = self.arrays[name][:, list(axes[1]).index(kv_heads / fold)]
        plane, source = _heads(grid, axes[0], heads / fold)
        if fold > 1:
            source = Source.MODELLED
        known = ~np.isnan(plane).all(axis=1)
        plane, rows = plane[known], axes[2][known]
        _extend(plane, rows, axes[3] + 1)
        by_context = np.stack([_along(axes[3] + 1, line, context) for line in plane])
        by_batch = np.stack([_along(rows, column, batch * fold) for column in by_context.T]).T
        return by_batch, max(source, Source.INTERPOLATED)


def _along(axis: Array, values: Array, wanted: Array, power: float = 1.0) -> Array:
    """Interpolates logarithms. Above the axis time grows with ``power``; below it stays what it is at the start."""
    inside = np.clip(wanted, axis[0], axis[-1])
    ms = np.exp(np.interp(np.log(inside), np.log(axis), np.log(values)))
    return np.asarray(ms * np.maximum(wanted / axis[-1], 1.0) ** power)


def _extend(plane: Array, batch: Array, context: Array) -> None:
    """Fills a plane [batch, context] in place where the GPU's memory ended the measurements.

    There time grows with the number of requests, from the most that were measured at the same context; only where none
    was, it grows with the context. A few tokens for each of very many requests are no measure for long contexts.
    """
    for column in plane.T:  # views
        good = np.flatnonzero(~np.isnan(column))
        if len(good):
            column[good[-1] + 1 :] = column[good[-1]] * batch[good[-1] + 1 :] / batch[good[-1]]
    for line in plane:
        last = np.flatnonzero(~np.isnan(line))[-1]
        line[last + 1 :] = line[last] * context[last + 1 :] / context[last]


def _bilinear(grid: Array, n_axis: Array, k_axis: Array, n: float, k: float) -> tuple[Array, Source]:
    """The column [m] of a grid [m, n, k] at a shape. Outside of the grid time grows with the size."""
    source = Source.MEASURED
    scale = 1.0
    parts: list[tuple[int, int, float]] = []
    for axis, value in ((n_axis, n), (k_axis, k)):
        if not axis[0] <= value <= axis[-1]:
            source = Source.MODELLED
            scale *= value / np.clip(value, axis[0], axis[-1])
        value = float(np.clip(value, axis[0], axis[-1]))
        high = int(np.searchsorted(axis, value))
        low = high if axis[high] == value else high - 1
        share = 0.0 if low == high else np.log(value / axis[low]) / np.log(axis[high] / axis[low])
        if share and source is Source.MEASURED:
            source = Source.INTERPOLATED
        parts.append((low, high, float(share)))
    (n0, n1, a), (k0, k1, b) = parts
    logs = np.log(grid)
    left = logs[:, n0, k0] if not b else logs[:, n0, k0] * (1 - b) + logs[:, n0, k1] * b
    if not a:
        return np.exp(left) * scale, source
    right = logs[:, n1, k0] if not b else logs[:, n1, k0] * (1 - b) + logs[:, n1, k1] * b
    return np.exp(left * (1 - a) + right * a) * scale, source


def _heads(grid: Array, axis: Array, heads: float) -> tuple[Array, Source]:
    """A slice of a grid [heads, ...] at a number of query heads; outside of the axis the nearest, in proportion."""
    known = ~np.isnan(grid.reshape(len(axis), -1)).all(axis=1)
    axis, grid = axis[known], grid[known]
    if not len(axis):
        return np.full(grid.shape[1:], np.nan), Source.MODELLED
    if heads in axis:
        return grid[list(axis).index(heads)].copy(), Source.MEASURED
    if heads < axis[0] or heads > axis[-1]:
        near = 0 if heads < axis[0] else -1
        return grid[near] * max(1.0, heads / axis[near]), Source.MODELLED
    high = int(np.searchsorted(axis, heads))
    share = np.log(heads / axis[high - 1]) / np.log(axis[high] / axis[high - 1])
    return np.exp(np.log(grid[high - 1]) * (1 - share) + np.log(grid[high]) * share), Source.INTERPOLATED
