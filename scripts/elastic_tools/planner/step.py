"""How long one step of the engine takes: so many tokens, so many requests that decode, so many chunks of prompts."""

import math
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass

import numpy as np

from elastic_tools.planner.cache import DTYPES, CacheDtype, layer_token_bytes
from elastic_tools.planner.hardware import GPU
from elastic_tools.planner.model import ELEMENT, ModelConfig
from elastic_tools.planner.operators import ATTENTION_COMPUTE, ATTENTION_MEMORY, LAUNCH, Operators, Source
from elastic_tools.planner.tables import Array, Tables, load

MOST_TOKENS = 131_072
GRID = np.unique(np.concatenate([2.0 ** np.arange(18), 3 * 2.0 ** np.arange(16)]))  # tokens of a step
LENGTHS: list[float] = GRID.tolist()  # for look-ups of one value, which are faster in a list
# Modelled: what a step costs beside the GPU's work. Scheduling and sampling overlap with it up to this rest.
STEP_FIXED, STEP_PER_REQUEST = 0.3, 0.004  # ms


@dataclass(frozen=True)
class Part:
    """One kind of work in a step: its time for the tokens of ``GRID`` in ms, and how it is known."""

    name: str
    ms: Array
    source: Source


class StepTimes:
    """Step times of one model on ``tp`` GPUs with one cache format. All times in ms."""

    def __init__(
        self,
        model: ModelConfig,
        gpu: GPU,
        dtype: CacheDtype,
        tp: int = 1,
        ideal: bool = False,
        tables: Tables | None = None,
    ) -> None:
        model.check_tp(tp)
        self.model, self.gpu, self.dtype, self.tp = model, gpu, dtype, tp
        operators = Operators(gpu, tables or load(gpu))
        self.parts = self._parts(operators)
        self._total: Array = np.sum([part.ms for part in self.parts], axis=0)
        self._linear: dict[int, float] = {}  # by tokens, as they are asked for: few of the 131,072 ever are
        head = operators.gemm(GRID[GRID <= 4096], -(-model.head_rows // tp), model.hidden, 16)
        gathered = operators.all_reduce(GRID[GRID <= 4096] * model.head_rows / 2, tp)
        self.head = Part("logits", head.ms + gathered.ms, max(head.source, gathered.source))
        self._head: list[float] = np.interp(np.arange(4097), GRID[GRID <= 4096], self.head.ms).tolist()
        self._attention(operators, ideal)

    # --- what a simulation asks for, many times ---

    def linear(self, tokens: int) -> float:
        """Everything but attention and logits in a step of ``tokens`` tokens."""
        if tokens > MOST_TOKENS:
            return self.linear(MOST_TOKENS) * tokens / MOST_TOKENS
        if (ms := self._linear.get(tokens)) is None:
            ms = self._linear[tokens] = float(np.interp(tokens, GRID, self._total))
        return ms

    def part(self, part: Part, tokens: int) -> float:
        """One kind of work in a step of ``tokens`` tokens."""
        return float(np.interp(tokens, GRID, part.ms))

    def logits(self, requests: int) -> float:
        """The output head for ``requests`` requests."""
        return self._head[min(requests, 4096)]

    def decode(self, requests: int, context: float) -> float:
        """Attention of ``requests`` requests with ``context`` tokens each on average."""
        if not requests:
            return 0.0
        total = 0.0
        for window, layers, grid in self._decode:
            total += layers * _look_up(grid, requests, min(context, window) if window else context)
        return total

    def prefill(self, tokens: int, before: int) -> float:
        """Attention of a chunk of ``tokens`` tokens that follows ``before`` tokens of its prompt.

        Over itself a chunk is as slow as a prompt of its length. Over the tokens before it, which was not measured, it
        is taken to be as fast as the whole prompt so far would be, and to take at least what reading the cache takes.
        So what is said of the cost of cutting a prompt is the least that it can be.
        """
        whole = tokens + before
        total = 0.0
        for window, layers, _ in self._decode:
            full = min(whole, window) if window else whole
            own = min(tokens, window) if window else tokens
            alone, sofar = pairs(tokens, window), pairs(whole, window) - pairs(before, window)
            each = self._causal(own) * alone / pairs(own, 0)
            each += self._causal(full) * max(0.0, sofar - alone) / pairs(full, 0)
            total += layers * each
        return max(total, self.decode(1, whole)) if before else total

    def step(self, decoding: int, context: float, chunks: list[tuple[int, int]]) -> float:
        """A step in which ``decoding`` requests decode and ``chunks`` of prompts, (tokens, before), are computed."""
        tokens = decoding + sum(size for size, _ in chunks)
        requests = decoding + len(chunks)
        time = self.linear(tokens) + self.logits(requests) + self.decode(decoding, context)
        for size, before in chunks:
            time += self.prefill(size, before)
        return time + STEP_FIXED + STEP_PER_REQUEST * requests

    # --- what goes into it ---

    def _parts(self, operators: Operators) -> list[Part]:
        model, tp = self.model, self.tp
        sums: dict[str, Array] = {}
        sources: dict[str, Source] = {}

        def add(name: str, ms: Array, source: Source, times: int = 1) -> None:
            sums[name] = sums.get(name, np.zeros_like(GRID)) + ms * times
            sources[name] = max(sources.get(name, Source.MEASURED), source)

        kinds = Counter(
            (model.has_experts(layer), model.expert_bits(layer), tuple(model.linears(layer, tp)))
            for layer in range(model.layers)
        )
        for (experts, bits, linears), count in kinds.items():
            for linear in linears:
                timed = operators.gemm(GRID, linear.n, linear.k, linear.bits)
                add("MLP" if linear.name in _MLP else "attention projections", timed.ms, timed.source, count)
            width = model.intermediate
            if experts and model.moe:
                moe = model.moe
                timed = operators.experts(GRID, model.hidden, moe.width, moe.active, moe.experts, tp, bits)
                add("experts", timed.ms, timed.source, count)
                width = moe.shared_width
            moved = GRID * ELEMENT * (8 * model.hidden + (2 * model.qkv_width + 3 * width) / tp)
            timed = operators.elementwise(moved, 5)
            add("norms, rotation, activation", timed.ms, timed.source, count)
            timed = operators.all_reduce(GRID * model.hidden, tp)
            add("all-reduce", timed.ms, timed.source, 2 * count)
        return [Part(name, sums[name], sources[name]) for name in sums]

    def _attention(self, operators: Operators, ideal: bool) -> None:
        model, tp = self.model, self.tp
        windows = sorted(set(model.windows))
        skipped = min(2 * self.dtype.skip, model.layers)
        if model.mla:
            grid, self._prefill_line, source = self._latent(operators)
            self._decode = [(0, model.layers, grid)]
            self.attention_source = self.prefill_source = source
            return
        heads, kv_heads = model.heads // tp, model.kv_heads_on(tp)
        grid_array, source = operators.decode(self.dtype, heads, kv_heads, model.head_dim, ideal)
        if skipped:
            plain, _ = operators.decode(DTYPES["auto"], heads, kv_heads, model.head_dim)
            grid_array = (grid_array * (model.layers - skipped) + plain * skipped) / model.layers
        grid = _logs(grid_array)
        self._decode = [(window, model.windows.count(window), grid) for window in windows]
        self.attention_source = max(source, Source.MODELLED if any(windows) else source)
        prefill = operators.prefill(GRID, heads, kv_heads, model.head_dim)
        self._prefill_line = [float(ms) for ms in prefill.ms]
        self.prefill_source = prefill.source

    def _latent(self, operators: Operators) -> tuple[list[list[float]], list[float], Source]:
        """MLA from a roofline: its measurements are of other widths."""
        mla, model = self.model.mla, self.model
        assert mla is not None
        width = mla.kv_rank + mla.rope
        size = layer_token_bytes(model, self.dtype, self.tp, 0)
        heads = model.heads // self.tp
        work = 2.0 ** np.arange(12)[:, None] * 2.0 ** np.arange(19)[None, :]
        compute = 2 * work * heads * (width + mla.kv_rank) / (self.gpu.flops[16] * ATTENTION_COMPUTE) * 1e3
        grid = np.maximum(np.asarray(operators.stream(work * size, ATTENTION_MEMORY)), compute) + 10 * LAUNCH
        flops = GRID**2 * heads * (mla.nope + mla.rope + mla.value)
        line = flops / (self.gpu.flops[16] * ATTENTION_COMPUTE) * 1e3 + 5 * LAUNCH
        return _logs(grid), [float(ms) for ms in line], Source.MODELLED

    def _causal(self, length: float) -> float:
        """Attention of one layer over a prompt of ``length`` tokens."""
        if length > LENGTHS[-1]:
            return self._prefill_line[-1] * (length / LENGTHS[-1]) ** 2
        position = bisect_left(LENGTHS, length)
        if LENGTHS[position] == length:
            return self._prefill_line[position]
        low, high = LENGTHS[position - 1], LENGTHS[position]
        share = math.log(length / low) / math.log(high / low)
        a, b = self._prefill_line[position - 1], self._prefill_line[position]
        return float(a ** (1 - share) * b**share)

    def sources(self) -> dict[str, Source]:
        """How each kind of work is known."""
        known = {part.name: part.source for part in [*self.parts, self.head]}
        return known | {
            "decode attention": self.attention_source,
            "prefill attention, uncut prompts": self.prefill_source,
            "prefill attention, cut prompts": Source.MODELLED,
        }


_MLP = {"router", "gate_up", "down", "shared gate_up", "shared down"}


def pairs(tokens: float, window: int) -> float:
    """Pairs of a query and a key in causal attention over ``tokens`` tokens with a window, 0 for none."""
    if not window or tokens <= window:
        return tokens * tokens / 2
    return window * window / 2 + (tokens - window) * window


def _logs(grid: Array) -> list[list[float]]:
    return [[float(value) for value in row] for row in np.log2(grid)]


def _look_up(grid: list[list[float]], requests: float, context: float) -> float:
    """Bilinear in logarithms, on axes that are powers of two; beyond them time grows with the work."""
    x, y = math.log2(requests), math.log2(max(context, 1.0))
    beyond = 1.0
    if x > 11:
        beyond, x = requests / 2048, 11.0
    if y > 18:
        beyond, y = beyond * context / 2**18, 18.0
    i, j = min(int(x), 10), min(int(y), 17)
    a, b = x - i, y - j
    low, high = grid[i], grid[i + 1]
    value = (low[j] * (1 - b) + low[j + 1] * b) * (1 - a) + (high[j] * (1 - b) + high[j + 1] * b) * a
    seconds: float = beyond * 2.0**value
    return seconds
