"""The shapes of a model, and how many weights of each kind it has."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from elastic_tools.planner.errors import PlanError
from elastic_tools.planner.quantization import WeightFormat, named

QK_NORM = ("qwen3", "qwen3_moe")
ELEMENT = 2  # bytes of an activation and of a plain cache entry: vLLM serves checkpoints in float32 as 16 bit, too


@dataclass(frozen=True)
class MLA:
    """Multi-head latent attention: one latent vector per token instead of keys and values for each head."""

    kv_rank: int
    q_rank: int | None
    nope: int
    rope: int
    value: int


@dataclass(frozen=True)
class MoE:
    """The experts of a layer. ``width`` is the intermediate size of one routed expert."""

    experts: int
    active: int
    width: int
    shared_width: int


@dataclass(frozen=True)
class Linear:
    """One matrix product of a layer on one rank: ``k`` inputs, ``n`` outputs, ``bits`` a weight."""

    name: str
    n: int
    k: int
    bits: float


_SPLIT_INPUTS = ("o", "down", "shared down")


@dataclass(frozen=True)
class ModelConfig:
    """The shapes of a decoder.

    ``windows`` has one entry a layer: the sliding window in tokens, or 0 for full attention. ``expert_layers`` has one
    entry a layer, too: whether its MLP is made of experts. ``hub`` is what Hugging Face calls the model, where known.
    ``uncounted`` are the fields of the config.json that describe parts beside the decoder.
    """

    name: str
    kind: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_len: int
    tied: bool
    windows: tuple[int, ...]
    qkv_bias: bool
    weights: WeightFormat
    mla: MLA | None
    moe: MoE | None
    expert_layers: tuple[bool, ...]
    hub: str | None = None
    uncounted: tuple[str, ...] = ()

    # --- tensor parallelism ---

    def tp_problem(self, tp: int) -> str | None:
        """Why vLLM refuses to split the model over ``tp`` ranks, or None."""
        if tp < 1:
            return f"it is {tp}, and must be 1 or more"
        if self.heads % tp:
            return f"{self.heads} attention heads cannot be divided by it"
        if self.mla is None and self.kv_heads >= tp and self.kv_heads % tp:
            return f"{self.kv_heads} KV heads cannot be divided by it"
        if self.mla is None and self.kv_heads < tp and tp % self.kv_heads:
            return f"it is not a multiple of {self.kv_heads} KV heads, so they cannot be replicated evenly"
        for width in {self.intermediate, self.moe.width if self.moe else self.intermediate}:
            if width % tp:
                return f"the intermediate size {width} cannot be divided by it"
        group = self.weights.group
        for layer in range(self.layers) if group else ():
            for linear in self.linears(layer, tp):
                if linear.name in _SPLIT_INPUTS and linear.bits < 16 and linear.k % group:
                    return (
                        f"the {linear.k} inputs that a rank has of {linear.name!r} are no multiple of the {group} "
                        "weights that share a scale"
                    )
        return None

    def check_tp(self, tp: int) -> None:
        """Raises ``PlanError`` with the reason and the nearest size that works."""
        if problem := self.tp_problem(tp):
            valid = [size for size in range(1, self.heads + 1) if self.tp_problem(size) is None]
            if not valid:
                raise PlanError(f"{self.name} cannot run at any tensor parallel size: at 1, {self.tp_problem(1)}.")
            near = min(valid, key=lambda size: (abs(size - tp), size))
            raise PlanError(f"{self.name} cannot run at tensor parallel size {tp}: {problem}; the nearest is {near}.")

    def kv_heads_on(self, tp: int) -> int:
        """KV heads that one rank keeps: at least one, replicated where there are more ranks than heads."""
        return 1 if self.mla else max(1, self.kv_heads // tp)

    # --- weights ---

    @property
    def qkv_width(self) -> int:
        """Outputs of the query, key and value projections."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def linears(self, layer: int, tp: int) -> list[Linear]:
        """The dense matrix products of one layer on one rank, without its routed experts."""
        return self._attention(layer, tp) + self._mlp(layer, tp)

    def _attention(self, layer: int, tp: int) -> list[Linear]:
        hidden, heads, mla = self.hidden, self.heads // tp, self.mla

        def one(name: str, n: int, k: int) -> Linear:
            return Linear(name, n, k, self.weights.of(layer, name))

        if mla is None:
            out = (heads + 2 * self.kv_heads_on(tp)) * self.head_dim
            return [one("qkv", out, hidden), one("o", hidden, heads * self.head_dim)]
        query = heads * (mla.nope + mla.rope)
        down = [one("kv_a", mla.kv_rank + mla.rope, hidden)]  # on every rank
        if mla.q_rank is None:
            down.append(one("q", query, hidden))
        else:
            down += [one("q_a", mla.q_rank, hidden), one("q_b", query, mla.q_rank)]
        up = one("kv_b", heads * (mla.nope + mla.value), mla.kv_rank)
        return [*down, up, one("o", hidden, heads * mla.value)]

    def _mlp(self, layer: int, tp: int) -> list[Linear]:
        """All of a dense MLP, or the router and what a layer of experts shares."""
        if not self.has_experts(layer):
            return self._gated(layer, "", self.intermediate // tp)
        assert self.moe is not None
        router = Linear("router", self.moe.experts, self.hidden, 16)
        return [router, *self._gated(layer, "shared ", self.moe.shared_width // tp)]

    def _gated(self, layer: int, prefix: str, width: int) -> list[Linear]:
        if not width:
            return []
        up, down = f"{prefix}gate_up", f"{prefix}down"
        return [
            Linear(up, 2 * width, self.hidden, self.weights.of(layer, up)),
            Linear(down, self.hidden, width, self.weights.of(layer, down)),
        ]

    def expert_bits(self, layer: int) -> float:
        """Bits a weight of the routed experts of a layer."""
        return self.weights.of(layer, "experts")

    def has_experts(self, layer: int) -> bool:
        """Whether the MLP of a layer is made of experts."""
        return self.expert_layers[layer]

    @property
    def head_rows(self) -> int:
        """Rows of the embedding, padded as vLLM pads them."""
        return -(-self.vocab // 64) * 64

    def small(self) -> Iterator[int]:
        """Elements of norms and biases, kept whole on every rank: for each layer, then for the model."""
        norms = 4 if self.kind in ("gemma2", "gemma3_text") else 2
        for _ in range(self.layers):
            here = norms * self.hidden
            if self.mla:
                here += self.mla.kv_rank + (self.mla.q_rank or 0)
            if self.kind in QK_NORM:
                here += 2 * self.head_dim
            if self.qkv_bias:
                here += self.qkv_width
            yield here
        yield self.hidden

    @property
    def parameters(self) -> int:
        """How many parameters the model has."""
        total = sum(self.small()) + self.vocab * self.hidden * (1 if self.tied else 2)
        for layer in range(self.layers):
            for linear in self.linears(layer, 1):
                total += linear.n * linear.k
            if self.has_experts(layer) and self.moe:
                total += self.moe.experts * 3 * self.hidden * self.moe.width
        return total

    def with_weights(self, name: str) -> "ModelConfig":
        """The same model with linear layers of another precision: bf16, fp8, int8 or int4."""
        return replace(self, weights=named(name))
