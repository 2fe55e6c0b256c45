"""Reads a Hugging Face ``config.json``, or a preset of ``configs/models``."""

import json
import os
from pathlib import Path
from typing import Any, TypeVar

from elastic_tools.pins import ROOT
from elastic_tools.planner.errors import PlanError, nearest, sentence
from elastic_tools.planner.model import MLA, ModelConfig, MoE
from elastic_tools.planner.quantization import named, of_config

PRESETS = ROOT / "configs" / "models"
# Architectures whose query, key and value projections have a bias without a field that says so.
QKV_BIAS = ("qwen2", "qwen2_moe")
# Activations of MLPs without a gate, which have two matrices instead of three. Gemma's old configs say "gelu", but its
# MLP has a gate.
UNGATED = ("gelu", "gelu_new", "gelu_fast", "quick_gelu", "relu", "relu2", "xielu")
LAYER_TYPES = ("full_attention", "attention", "sliding_attention")
# Beginnings of fields of configs whose layers keep a state, choose what they read, share a cache, or are not all of one
# shape: their cache is another one.
OTHER_LAYERS = (
    "layers_block_type", "hybrid_override_pattern", "attn_layer_period", "attn_type_list", "mamba_", "ssm_",
    "linear_conv_", "conv_L_cache", "attention_chunk_size", "index_topk", "num_kv_shared_layers", "use_cla",
    "lru_width", "global_head_dim", "num_global_", "swa_head_", "swa_num_",
)  # fmt: skip
BESIDE = ("vision_config", "audio_config")  # parts of a model beside its decoder
Config = dict[str, Any]
T = TypeVar("T", dict[str, Any], list[Any], str, bool)
# The most that a field can be; of the layers and the heads more would only take time and memory.
MOST, MOST_OF = 2**40, {"num_hidden_layers": 4096, "num_attention_heads": 65536}


def presets() -> list[str]:
    """The names of the models that come with the planner."""
    return sorted(path.stem for path in PRESETS.glob("*.json"))


def load_model(source: str, weights: str | None = None) -> ModelConfig:
    """Reads a preset, a ``config.json`` or a directory that holds one.

    ``weights`` overrides the precision of the linear layers: "bf16", "fp8", "int8" or "int4". Raises ``PlanError``.
    """
    path = Path(os.path.expanduser(source))
    if source and path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise PlanError(f"The folder {source!r} has no config.json.")
    if not path.is_file():
        by_name = {name.lower(): name for name in presets()}
        if source.lower() not in by_name:
            near = nearest(source, presets())
            raise PlanError(
                f"There is no model {source!r}: give the path of a config.json, or a preset such as {near}."
            )
        path = PRESETS / f"{by_name[source.lower()]}.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8-sig"))
    except RecursionError:
        raise PlanError(f"{path} is nested too deeply; a Hugging Face config.json is wanted.") from None
    except (OSError, ValueError) as error:
        raise PlanError(f"{path} cannot be read as JSON ({error}); a Hugging Face config.json is wanted.") from None
    name = path.resolve().parent.name if path.name == "config.json" else path.stem
    return parse(sentence(name) or "the model", raw, weights)  # a name may have line breaks, and a line has not


def parse(name: str, raw: Any, weights: str | None = None) -> ModelConfig:
    """The shapes in a parsed ``config.json``. Raises ``PlanError`` where a field is missing or makes no sense."""
    if not isinstance(raw, dict):
        raise PlanError(f"The config of {name} is no JSON object; a Hugging Face config.json is wanted.")
    config = raw | typed(name, raw, "text_config", dict, {})
    kind = typed(name, config, "model_type", str, "llama")
    check_known(name, kind, config)
    hidden, layers, heads = (
        number(name, config, field) for field in ("hidden_size", "num_hidden_layers", "num_attention_heads")
    )
    moe = parse_moe(name, config)
    intermediate = number(name, config, "intermediate_size", moe.width if moe else None)
    kv_heads = number(name, config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise PlanError(
            f"The config of {name} is not enough: {heads} attention heads are no multiple of {kv_heads} KV heads."
        )
    hub = config.get("_name_or_path")
    return ModelConfig(
        name=name,
        kind=kind,
        hidden=hidden,
        intermediate=intermediate,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=number(name, config, "head_dim", max(1, hidden // heads)),
        vocab=number(name, config, "vocab_size"),
        max_len=number(name, config, "max_position_embeddings", 8192),
        tied=typed(name, config, "tie_word_embeddings", bool, kind.startswith("gemma")),
        windows=parse_windows(name, kind, config, layers),
        qkv_bias=kind in QKV_BIAS or typed(name, config, "attention_bias", bool, False),
        weights=named(weights) if weights is not None else of_config(name, config.get("quantization_config")),
        mla=parse_mla(name, config),
        moe=moe,
        expert_layers=parse_expert_layers(name, config, layers) if moe else (False,) * layers,
        hub=hub if isinstance(hub, str) and hub else None,
        uncounted=tuple(part for part in BESIDE if config.get(part)),
    )


def check_known(name: str, kind: str, config: Config) -> None:
    """Refuses what the shapes alone would be misread as a plain decoder for. Raises ``PlanError``."""
    types = typed(name, config, "layer_types", list, [])
    other = next((repr(each) for each in types if each not in LAYER_TYPES), None)
    fields = (field for field in sorted(config) if field.startswith(OTHER_LAYERS) and config[field])
    if found := other or next(fields, None) or (kind if "mamba" in kind else None):
        raise PlanError(
            f"{name} has layers of another kind ({found}), which the planner has no cost model for; it knows full and "
            "sliding-window attention and MLA."
        )
    activation = config.get("hidden_act")
    ungated = kind == "starcoder2" or (activation in UNGATED and not kind.startswith("gemma"))
    if ungated or config.get("is_encoder_decoder"):
        raise PlanError(
            f"{name} is of the family {kind!r}, which the planner has no cost model for; it knows decoders whose MLP "
            "has a gate, such as llama, qwen3 and mixtral."
        )


KINDS = {dict: "an object", list: "a list", str: "a text", bool: "true or false"}


def typed(name: str, config: Config, field: str, kind: type[T], default: T) -> T:
    """A field of a kind; ``default`` where it is missing or null. Raises ``PlanError``."""
    value = config.get(field)
    if value is None:
        return default
    if not isinstance(value, kind):
        raise PlanError(f"The config of {name} makes no sense: {field} is {value!r}, and must be {KINDS[kind]}.")
    return value


def number(name: str, config: Config, field: str, default: int | None = None) -> int:
    """A whole number above zero; ``default`` where the field is missing or null. Raises ``PlanError``."""
    value = config.get(field)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        found = f"is {value!r}" if field in config else "is missing"
        raise PlanError(f"The config of {name} is not enough: {field} {found}, and must be a whole number above 0.")
    if value > (most := MOST_OF.get(field, MOST)):
        raise PlanError(f"The config of {name} makes no sense: {field} is {value}, and must be {most:,} or less.")
    return value


def parse_mla(name: str, config: Config) -> MLA | None:
    """The widths of latent attention, where the model has it."""
    if not config.get("kv_lora_rank"):
        return None
    return MLA(
        kv_rank=number(name, config, "kv_lora_rank"),
        q_rank=number(name, config, "q_lora_rank") if config.get("q_lora_rank") else None,
        nope=number(name, config, "qk_nope_head_dim"),
        rope=number(name, config, "qk_rope_head_dim"),
        value=number(name, config, "v_head_dim"),
    )


def parse_moe(name: str, config: Config) -> MoE | None:
    """The experts, whatever the family calls them."""
    field = next((key for key in ("num_local_experts", "num_experts", "n_routed_experts") if config.get(key)), None)
    if field is None:
        return None
    experts, active = number(name, config, field), number(name, config, "num_experts_per_tok")
    if active > experts:
        raise PlanError(f"The config of {name} is not enough: a token visits {active} of {experts} experts.")
    width = number(
        name, config, "moe_intermediate_size" if config.get("moe_intermediate_size") else "intermediate_size"
    )
    shared = config.get("n_shared_experts")
    default = number(name, config, "n_shared_experts") * width if shared else None
    if config.get("shared_expert_intermediate_size"):
        default = number(name, config, "shared_expert_intermediate_size")
    return MoE(experts, active, width, default or 0)


def parse_expert_layers(name: str, config: Config, layers: int) -> tuple[bool, ...]:
    """Which layers have experts: each family has its own fields for it, as vLLM's model classes read them."""
    first = config.get("first_k_dense_replace") or 0
    every = number(name, config, "moe_layer_freq", 1) if not isinstance(config.get("moe_layer_freq"), list) else 1
    step = number(name, config, "decoder_sparse_step", number(name, config, "interleave_moe_layer_step", 1))
    dense = config.get("mlp_only_layers") or ()
    listed = config.get("moe_layer_freq")
    if not isinstance(first, int) or not isinstance(dense, list | tuple):
        raise PlanError(f"The config of {name} is not enough: first_k_dense_replace or mlp_only_layers makes no sense.")
    if isinstance(listed, list):
        if len(listed) != layers:
            raise PlanError(f"The config of {name} is not enough: moe_layer_freq has {len(listed)} of {layers} layers.")
        return tuple(bool(each) for each in listed)
    return tuple(
        layer >= first and layer % every == 0 and (layer + 1) % step == 0 and layer not in dense
        for layer in range(layers)
    )


def parse_windows(name: str, kind: str, config: Config, layers: int) -> tuple[int, ...]:
    """The sliding window of each layer; 0 for full attention."""
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return (0,) * layers
    window = number(name, config, "sliding_window")
    if types := config.get("layer_types"):
        if len(types) != layers:
            raise PlanError(f"The config of {name} is not enough: layer_types has {len(types)} of {layers} layers.")
        return tuple(window if each == "sliding_attention" else 0 for each in types)
    if kind == "gemma2":
        return tuple(0 if layer % 2 else window for layer in range(layers))
    if config.get("sliding_window_pattern"):
        pattern = number(name, config, "sliding_window_pattern")
        return tuple(0 if (layer + 1) % pattern == 0 else window for layer in range(layers))
    return (window,) * layers
