"""Where the memory of a GPU goes: weights, activations, CUDA graphs, the framework, and the KV cache with the rest.

The KV cache is exact (``cache``). Weights are exact up to the padding of kernels. What is left is a model with stated
constants; ``make plan-accuracy`` prints how far it is off.
"""

from dataclasses import dataclass
from functools import lru_cache

from elastic_tools.planner.cache import IN_FLIGHT, CacheDtype, KVLayout, block_tokens, cache_problem, kv_layout
from elastic_tools.planner.errors import PlanError
from elastic_tools.planner.hardware import GPU
from elastic_tools.planner.model import ELEMENT, ModelConfig

GIB = 2**30
UTILIZATION = 0.92  # --gpu-memory-utilization, this vLLM's default
# Modelled: what the process takes outside torch while it starts (vLLM logs 0.10 to 0.25 GiB), and NCCL's buffers.
FRAMEWORK = round(0.25 * GIB)
NCCL = {1: 0, 2: 358_612_992, 4: 411_041_792, 8: 411_041_792}  # bytes, aiconfigurator-core systems/*.yaml
GRAPH_FIXED, GRAPH_PER_LAYER = round(0.25 * GIB), 9 * 2**20  # bytes; modelled, 51 captured sizes share their pool
LOGIT_BYTES = 2 + 4 + 4  # a logit as the head gives it, in float32, and its probability in float32


@dataclass(frozen=True)
class Activations:
    """The activation reserve of one rank, in bytes, and what it is made of."""

    hidden: int
    wide: int
    logits: int

    @property
    def total(self) -> int:
        """Layers and the sampler do not run at the same time, so the larger of the two counts."""
        return self.hidden + max(self.wide, self.logits)


def activations(model: ModelConfig, tokens: int, tp: int = 1, sequences: int = 256) -> Activations:
    """The most that a step of ``tokens`` tokens keeps alive on one rank.

    reserve(T) = 2 T h e + max(T e W / tp, S V 10), with h the hidden size, e the bytes of an element, S the sequences
    that are sampled, V the vocabulary, and W the widest moment of a layer: 3 I in a gated MLP (gate, up and their
    product), or queries, keys, values and output of attention, or for experts k (3 I + h) for the k that a token
    visits. The residual stream and the input of a layer are whole on every rank, and so are logits: only W melts away
    under tensor parallelism. W was chosen by one published figure (Qwen3-8B on an RTX 4090, vLLM pull request 48322):
    from 2,048 to 8,192 tokens the cache loses 89,856 bytes for each token of the step, and the terms in T alone give
    90,112. With the 256 sequences that vLLM takes by default on that card the sampler's term is the larger one at 2,048
    tokens, so the whole formula gives less; ``make plan-accuracy`` prints both capacities.
    """
    attention = model.heads * (model.mla.nope + model.mla.rope + model.mla.value) if model.mla else model.qkv_width
    wide = attention + model.heads * model.head_dim
    if not all(model.expert_layers):
        wide = max(wide, 3 * model.intermediate)
    if model.moe:
        wide = max(wide, 3 * model.moe.shared_width, model.moe.active * 3 * model.moe.width)
        wide += model.moe.active * model.hidden * tp  # the output of every expert is whole on every rank
    return Activations(
        hidden=2 * tokens * model.hidden * ELEMENT,
        wide=tokens * wide * ELEMENT // tp,
        logits=min(sequences, tokens) * model.head_rows * LOGIT_BYTES,
    )


@lru_cache(maxsize=256)
def weight_bytes(model: ModelConfig, tp: int = 1) -> int:
    """Weights on one of ``tp`` ranks, in bytes. Norms, routers and the latent projections of MLA are on every rank."""
    model.check_tp(tp)
    total = sum(model.small()) * ELEMENT * 8
    rows = -(-model.head_rows // tp)
    total += rows * model.hidden * ELEMENT * 8 * (1 if model.tied else 2)
    bits = 0.0
    for layer in range(model.layers):
        for linear in model.linears(layer, tp):
            bits += linear.n * linear.k * linear.bits
        if model.has_experts(layer) and model.moe:
            bits += model.moe.experts * 3 * model.hidden * (model.moe.width // tp) * model.expert_bits(layer)
    return round((total + bits) / 8)


@dataclass(frozen=True)
class Budget:
    """The memory of one rank in bytes, and the blocks that come of it."""

    total: int
    utilization: float
    weights: int
    reserve: Activations
    graphs: int
    framework: int
    layout: KVLayout
    in_flight: int  # tokens that are scheduled and not done, at most

    @property
    def requested(self) -> int:
        """What vLLM may use."""
        return int(self.total * self.utilization)

    @property
    def cache(self) -> int:
        """What is left for the KV cache; below zero where the rest does not fit."""
        return self.requested - self.weights - self.reserve.total - self.graphs - self.framework

    @property
    def blocks(self) -> int:
        """Blocks of the cache."""
        return self.layout.blocks(self.cache)

    def request_blocks(self, tokens: int) -> int:
        """Blocks that a request of ``tokens`` tokens takes at most."""
        return self.layout.request_blocks(tokens, self.in_flight)

    def tokens(self, length: int) -> int:
        """The "GPU KV cache size" that vLLM logs with --max-model-len ``length``: the requests of that length that its
        blocks hold, times the length.
        """
        return int(self.blocks / self.request_blocks(length) * length)


def budget(
    model: ModelConfig,
    gpu: GPU,
    dtype: CacheDtype,
    tp: int = 1,
    chunk: int | None = None,
    sequences: int | None = None,
    utilization: float = UTILIZATION,
    block: int | None = None,
) -> Budget:
    """The memory of one of ``tp`` ranks when steps have up to ``chunk`` tokens and ``sequences`` requests.

    Raises ``PlanError`` for sizes that vLLM refuses. That the weights do not fit is no error: ``cache`` is negative
    then.
    """
    if not 0 < utilization <= 1:
        raise PlanError(f"A GPU memory utilization of {utilization:g} cannot be: it is a share above 0 and up to 1.")
    if problem := cache_problem(model, dtype, gpu.sm):
        raise PlanError(problem)
    chunk = chunk or gpu.chunk
    sequences = sequences or gpu.max_seqs
    return Budget(
        total=gpu.memory,
        utilization=utilization,
        weights=weight_bytes(model, tp),
        reserve=activations(model, chunk, tp, sequences),
        graphs=GRAPH_FIXED + GRAPH_PER_LAYER * model.layers,
        framework=FRAMEWORK + (NCCL.get(tp) or (max(NCCL.values()) if tp > 1 else 0)),
        layout=kv_layout(model, dtype, tp, block or block_tokens(model, dtype, gpu.sm)),
        in_flight=IN_FLIGHT * chunk,
    )
