"""What the planner reads from a Hugging Face ``config.json``: shapes, and how many weights of each kind."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from elastic_tools.pins import ROOT
from elastic_tools.planner.errors import PlanError, nearest

PRESETS = ROOT / "configs" / "models"
NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
# Architectures whose query, key and value projections have a bias without a field that says so.
QKV_BIAS = ("qwen2", "qwen2_moe")
QK_NORM = ("qwen3", "qwen3_moe")
GROUP = 128  # weights that share a scale, in the usual 4-bit formats


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


@dataclass(frozen=True)
class ModelConfig:
    """The shapes of a decoder.

    ``windows`` has one entry a layer: the sliding window in tokens, or 0 for full attention.
    ``weight_bits`` is what a weight of the quantised linear layers takes, 16 where they are not quantised.
    ``element`` is the size of an activation, and of a cache entry with the cache dtype "auto", in bytes.
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
    weight_bits: int
    element: int
    dtype: str
    mla: MLA | None
    moe: MoE | None
    dense_layers: int  # layers at the start that have no experts, in a model with experts

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
        return None

    def check_tp(self, tp: int) -> None:
        """Raises ``PlanError`` with the reason and the nearest size that works."""
        if problem := self.tp_problem(tp):
            valid = [size for size in range(1, self.heads + 1) if self.tp_problem(size) is None]
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

    def attention_linears(self, tp: int) -> list[Linear]:
        """The projections of one attention layer on one rank."""
        bits, hidden = self.bits_stored, self.hidden
        if self.mla is None:
            out = (self.heads // tp + 2 * self.kv_heads_on(tp)) * self.head_dim
            return [Linear("qkv", out, hidden, bits), Linear("o", hidden, self.heads // tp * self.head_dim, bits)]
        mla, heads = self.mla, self.heads // tp
        query = heads * (mla.nope + mla.rope)
        down = [Linear("kv_a", mla.kv_rank + mla.rope, hidden, bits)]  # on every rank
        if mla.q_rank is None:
            down.append(Linear("q", query, hidden, bits))
        else:
            down += [Linear("q_a", mla.q_rank, hidden, bits), Linear("q_b", query, mla.q_rank, bits)]
        up = Linear("kv_b", heads * (mla.nope + mla.value), mla.kv_rank, bits)
        return [*down, up, Linear("o", hidden, heads * mla.value, bits)]

    def mlp_linears(self, layer: int, tp: int) -> list[Linear]:
        """The dense products of one layer's MLP on one rank: all of it, or what a layer of experts shares."""
        width = self.intermediate
        linears = []
        if self.has_experts(layer):
            assert self.moe is not None
            linears = [Linear("router", self.moe.experts, self.hidden, 16)]
            width = self.moe.shared_width
        if width:
            linears.append(Linear("gate_up", 2 * width // tp, self.hidden, self.bits_stored))
            linears.append(Linear("down", self.hidden, width // tp, self.bits_stored))
        return linears

    def has_experts(self, layer: int) -> bool:
        """Whether the MLP of a layer is made of experts."""
        return self.moe is not None and layer >= self.dense_layers

    @property
    def bits_stored(self) -> float:
        """Bits a quantised weight takes with its share of scales and zero points; 4-bit: groups of 128."""
        return self.weight_bits + (20 / GROUP if self.weight_bits == 4 else 0)

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
            for linear in self.attention_linears(1) + self.mlp_linears(layer, 1):
                total += linear.n * linear.k
            if self.has_experts(layer) and self.moe:
                total += self.moe.experts * 3 * self.hidden * self.moe.width
        return total

    def with_weights(self, bits: int) -> "ModelConfig":
        """The same model with linear layers of ``bits`` bits a weight."""
        return replace(self, weight_bits=bits)


def presets() -> list[str]:
    """The names of the models that come with the planner."""
    return sorted(path.stem for path in PRESETS.glob("*.json"))


def load_model(source: str, weights: str | None = None) -> ModelConfig:
    """Reads a preset, a ``config.json`` or a directory that holds one.

    ``weights`` overrides the precision of the linear layers: "bf16", "fp8", "int8" or "int4".
    """
    path = Path(source).expanduser()
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        by_name = {name.lower(): name for name in presets()}
        if source.lower() not in by_name:
            near = nearest(source, presets())
            raise PlanError(
                f"There is no model {source!r}: give the path of a config.json, or a preset such as {near}."
            )
        source = by_name[source.lower()]
        path = PRESETS / f"{source}.json"
    try:
        raw = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise PlanError(f"{path} cannot be read as JSON ({error}); a Hugging Face config.json is wanted.") from None
    name = path.parent.name if path.name == "config.json" else path.stem
    model = parse(name, raw)
    if weights is not None:
        sizes = {"bf16": 16, "fp8": 8, "int8": 8, "int4": 4}
        if weights not in sizes:
            raise PlanError(f"Weights of {weights!r} are unknown; the nearest is {nearest(weights, sizes)}.")
        model = model.with_weights(sizes[weights])
    return model


def parse(name: str, raw: Any) -> ModelConfig:
    """The shapes in a parsed ``config.json``. Raises ``PlanError`` where a field is missing or makes no sense."""
    if not isinstance(raw, dict):
        raise PlanError(f"The config of {name} is no JSON object; a Hugging Face config.json is wanted.")
    text = raw.get("text_config")
    config = {**raw, **text} if isinstance(text, dict) else raw
    for field in NEEDED:
        if not isinstance(config.get(field), int) or config[field] < 1:
            found = f"is {config[field]!r}" if field in config else "is missing"
            raise PlanError(f"The config of {name} is not enough: {field} {found}, and must be a number above 0.")
    kind = str(config.get("model_type", "llama"))
    if "layers_block_type" in config or "mamba" in kind or "linear_attention" in (config.get("layer_types") or []):
        raise PlanError(f"{name} has Mamba or linear-attention layers, which the planner has no cost model for.")

    heads, layers, hidden = config["num_attention_heads"], config["num_hidden_layers"], config["hidden_size"]
    moe = parse_moe(name, config)
    if "intermediate_size" not in config and moe is None:
        raise PlanError(f"The config of {name} is not enough: intermediate_size is missing.")
    mla = None
    if config.get("kv_lora_rank"):
        try:
            mla = MLA(
                config["kv_lora_rank"],
                config.get("q_lora_rank"),
                config["qk_nope_head_dim"],
                config["qk_rope_head_dim"],
                config["v_head_dim"],
            )
        except KeyError as missing:
            raise PlanError(f"The config of {name} is not enough: it has MLA, and {missing} is missing.") from None
    dtype = str(config.get("torch_dtype") or config.get("dtype") or "bfloat16")
    return ModelConfig(
        name=name,
        kind=kind,
        hidden=hidden,
        intermediate=config.get("intermediate_size") or (moe.width if moe else 0),
        layers=layers,
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        vocab=config["vocab_size"],
        max_len=config.get("max_position_embeddings", 8192),
        tied=bool(config.get("tie_word_embeddings", kind.startswith("gemma"))),
        windows=parse_windows(kind, config, layers),
        qkv_bias=kind in QKV_BIAS or bool(config.get("attention_bias", False)),
        weight_bits=parse_weight_bits(name, config),
        element=4 if dtype == "float32" else 2,
        dtype=dtype,
        mla=mla,
        moe=moe,
        dense_layers=config.get("first_k_dense_replace", 0) if moe else 0,
    )


def parse_moe(name: str, config: dict[str, Any]) -> MoE | None:
    """The experts, whatever the family calls them."""
    experts = next(
        (config[key] for key in ("num_local_experts", "num_experts", "n_routed_experts") if config.get(key)), 0
    )
    if not experts:
        return None
    if "num_experts_per_tok" not in config:
        raise PlanError(f"The config of {name} is not enough: it has experts, and num_experts_per_tok is missing.")
    width = config.get("moe_intermediate_size") or config["intermediate_size"]
    shared = config.get("shared_expert_intermediate_size") or (config.get("n_shared_experts") or 0) * width
    return MoE(experts, config["num_experts_per_tok"], width, shared)


def parse_windows(kind: str, config: dict[str, Any], layers: int) -> tuple[int, ...]:
    """The sliding window of each layer; 0 for full attention."""
    window = config.get("sliding_window") or 0
    if not window or config.get("use_sliding_window") is False:
        return (0,) * layers
    if types := config.get("layer_types"):
        return tuple(window if name == "sliding_attention" else 0 for name in types)
    if kind == "gemma2":
        return tuple(0 if layer % 2 else window for layer in range(layers))
    if pattern := config.get("sliding_window_pattern"):
        return tuple(0 if (layer + 1) % pattern == 0 else window for layer in range(layers))
    return (window,) * layers


def parse_weight_bits(name: str, config: dict[str, Any]) -> int:
    """Bits a weight of the linear layers, from ``quantization_config``."""
    quantization = config.get("quantization_config")
    if not quantization:
        return 16
    method = str(quantization.get("quant_method", ""))
    if method in ("awq", "gptq", "awq_marlin", "gptq_marlin"):
        return int(quantization.get("bits", 4))
    if method == "fp8":
        return 8
    if method in ("mxfp4", "nvfp4"):
        return 4
    groups = quantization.get("config_groups", {})
    bits = [(group.get("weights") or {}).get("num_bits") for group in groups.values()]
    if bits and bits[0]:
        return int(bits[0])
    raise PlanError(f"{name} is quantised with {method!r}, which the planner does not know; say --weights fp8 or int4.")
