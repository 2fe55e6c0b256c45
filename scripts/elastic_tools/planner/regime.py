"""Where the memory of a large prefill is won back: by a smaller chunk, or by lending the reserve while requests decode.

A chunk of C tokens keeps reserve(C) bytes free for the one step that needs them. A smaller chunk c frees reserve(C) -
reserve(c) for good, and costs time: weights and cache are read more often for one prompt. Lending frees reserve(C) -
reserve(s), s the tokens of a decode step, but only while no large prefill runs.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from elastic_tools.planner.cache import IN_FLIGHT, cache_dtype, cache_problem
from elastic_tools.planner.checkpoint import load_model
from elastic_tools.planner.errors import PlanError
from elastic_tools.planner.estimate import Plan, times_of, users
from elastic_tools.planner.hardware import gpu
from elastic_tools.planner.memory import activations
from elastic_tools.planner.model import ModelConfig
from elastic_tools.planner.record import table
from elastic_tools.planner.step import StepTimes

SMALLEST = 256  # tokens; chunks below it are not worth their steps
TTFT_COST = 0.01  # what a smaller chunk may cost of the TTFT: paper A's figure
WORTH = 0.01  # a gain below this share of the cache counts as none
MODELS = ("Llama-3.1-8B", "Qwen2.5-7B", "Llama-2-7B", "Qwen2.5-14B", "Qwen2.5-32B", "Llama-3.1-70B")
CONTEXTS = (2048, 4096, 8192, 16384, 32768, 65536, 131072)
CHUNKS = (2048, 8192, 32768, 131072)
TPS = (1, 2, 4, 8)
ANSWER = 512  # output tokens of a request in the map


@dataclass(frozen=True)
class Regime:
    """What one configuration gains. Gains are tokens of cache; ``cost`` is the TTFT of the small chunk over the large,
    less 1. A gain is what vLLM would log more as the size of its cache, for requests of this length.

    ``idle`` is the share of the time in which no prompt is computed, so the share in which the reserve can be lent.
    ``context`` is the prompt and the answer, ``tokens`` the cache without either, ``lent_blocks`` what is lent.
    """

    model: str
    gpu: str
    tp: int
    chunk: int
    context: int
    tokens: int
    small_chunk: int
    cost: float
    small_gain: float
    idle: float
    lent_most: float
    lent_blocks: int

    @property
    def lent_gain(self) -> float:
        """What lending gains on average over time."""
        return self.lent_most * self.idle

    @property
    def verdict(self) -> str:
        """ "small-chunk", "lend", or "neither" where both gain less than ``WORTH`` of the cache."""
        if max(self.small_gain, self.lent_gain) < WORTH * self.tokens:
            return "neither"
        return "lend" if self.lent_gain > self.small_gain else "small-chunk"

    def as_row(self) -> dict[str, Any]:
        """The figures on one line, tokens rounded."""
        found = asdict(self) | {"lent_gain": self.lent_gain, "verdict": self.verdict}
        return {name: round(value, 4) if isinstance(value, float) else value for name, value in found.items()}


def prefill_ms(times: StepTimes, prompt: int, chunk: int) -> float:
    """The time of one prompt alone in chunks of ``chunk`` tokens."""
    total, done = 0.0, 0
    while done < prompt:
        size = min(chunk, prompt - done)
        total += times.step(0, 0.0, [(size, done)])
        done += size
    return total


def smallest_chunk(times: StepTimes, prompt: int, chunk: int, allowed: float = TTFT_COST) -> tuple[int, float]:
    """The smallest chunk, a half, a quarter ... of ``chunk``, that costs at most ``allowed`` of the TTFT; and what it
    costs.
    """
    whole = prefill_ms(times, prompt, chunk)
    found, cost = chunk, 0.0
    size = chunk
    while size // 2 >= SMALLEST:
        size //= 2
        more = prefill_ms(times, prompt, size) / whole - 1
        if more <= allowed:  # measured times are not smooth, so a smaller chunk can cost less than a larger one
            found, cost = size, max(0.0, more)
    return found, cost


def regime(plan: Plan, prompt: int, output: int, allowed: float = TTFT_COST) -> Regime | None:
    """What a plan gains with such prompts and answers; None where not one request fits."""
    chunk = plan.step_tokens
    memory = plan.memory()
    length = prompt + output
    room = users(memory, length)
    if room < 1:
        return None
    times = times_of(plan)
    sequences = plan.step_sequences
    small, cost = smallest_chunk(times, prompt, chunk, allowed)
    running = max(1, min(int(room), sequences))
    decode = output * times.step(running, prompt + output / 2, [])
    prefill = running * prefill_ms(times, prompt, chunk)

    def blocks(tokens: int) -> int:
        """Blocks of the cache if only a step of ``tokens`` tokens is kept free."""
        kept = activations(plan.model, tokens, plan.tp, sequences).total
        return memory.layout.blocks(memory.cache + memory.reserve.total - kept)

    def holds(cache: int, step: int) -> float:
        """Tokens of requests of this length in ``cache`` blocks, with steps of up to ``step`` tokens."""
        return cache / memory.layout.request_blocks(length, IN_FLIGHT * step) * length

    plain, lent = holds(memory.blocks, chunk), max(0, blocks(min(sequences, chunk)) - memory.blocks)
    return Regime(
        model=plan.model.name,
        gpu=plan.gpu.name,
        tp=plan.tp,
        chunk=chunk,
        context=length,
        tokens=int(plain),
        small_chunk=small,
        cost=cost,
        small_gain=holds(blocks(small), small) - plain,
        idle=decode / (decode + prefill),
        lent_most=holds(memory.blocks + lent, chunk) - plain,
        lent_blocks=lent,
    )


def cells(
    models: Sequence[str] = MODELS, gpu_name: str = "H100", cache: str = "bf16", allowed: float = TTFT_COST
) -> Iterator[Regime]:
    """Every point of the map that vLLM takes and that fits, up to the context that a model was made for.

    Raises ``PlanError`` for a GPU or a cache dtype that no model can have.
    """
    device, dtype = gpu(gpu_name), cache_dtype(cache)
    for name in models:
        model: ModelConfig = load_model(name)
        if problem := cache_problem(model, dtype, device.sm):
            raise PlanError(problem)
        for tp in TPS:
            if model.tp_problem(tp):
                continue
            plan = Plan(model, device, dtype, tp, sequences=256)
            for chunk in CHUNKS:
                for context in CONTEXTS:
                    if context > model.max_len:
                        continue
                    found = regime(replace(plan, chunk=chunk), context - ANSWER, ANSWER, allowed)
                    if found is not None:
                        yield found


def summary(found: Sequence[Regime]) -> str:
    """How often each verdict falls, for each chunk, tensor parallel size and model."""
    verdicts = ("neither", "small-chunk", "lend")
    lines = [f"{len(found)} points", ""]
    for title, key in (("chunk", "chunk"), ("TP", "tp"), ("model", "model")):
        values = list(dict.fromkeys(getattr(each, key) for each in found))
        rows = []
        for value in values:
            counts = Counter(each.verdict for each in found if getattr(each, key) == value)
            rows.append([f"{value:,}" if isinstance(value, int) else value, *(str(counts[name]) for name in verdicts)])
        lines += [table((title, *verdicts), rows), ""]
    return "\n".join(lines).rstrip()
