"""How a checkpoint stores its weights: the bits of each matrix product, and the products that are left alone."""

import fnmatch
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from elastic_tools.planner.errors import PlanError, nearest

# Where the products of a layer are in a checkpoint; a list of modules that are not quantised names them so.
MODULES = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.qkv_proj"),
    "q": ("self_attn.q_proj",),
    "q_a": ("self_attn.q_a_proj",),
    "q_b": ("self_attn.q_b_proj",),
    "kv_a": ("self_attn.kv_a_proj_with_mqa",),
    "kv_b": ("self_attn.kv_b_proj",),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj", "mlp.gate_up_proj"),
    "down": ("mlp.down_proj",),
    "shared gate_up": ("mlp.shared_expert.gate_proj", "mlp.shared_experts.gate_proj"),
    "shared down": ("mlp.shared_expert.down_proj", "mlp.shared_experts.down_proj"),
    "experts": ("mlp.experts.0.gate_proj", "mlp.experts.gate_up_proj", "block_sparse_moe.experts.0.w1"),
}


@dataclass(frozen=True)
class WeightFormat:
    """The format of the quantised linear layers.

    ``bits`` a weight, 16 where nothing is quantised; ``group`` weights share a scale and a zero point of
    ``scale_bits`` bits (0: a whole channel or tensor does, which counts as nothing). ``ignored`` are patterns of
    modules that stay 16 bit.
    """

    bits: int = 16
    group: int = 0
    scale_bits: int = 0
    experts_only: bool = False
    ignored: tuple[str, ...] = ()

    @property
    def stored(self) -> float:
        """Bits a weight with its share of scales."""
        return self.bits + (self.scale_bits / self.group if self.group else 0)

    def of(self, layer: int, name: str) -> float:
        """Bits a weight of the product ``name`` in a layer."""
        if self.bits == 16 or name == "router" or (self.experts_only and name != "experts"):
            return 16
        return 16 if self.ignored and _ignores(self.ignored, layer, name) else self.stored


PLAIN = WeightFormat()
NAMED = {
    "bf16": PLAIN,
    "fp8": WeightFormat(8),
    "int8": WeightFormat(8),
    "int4": WeightFormat(4, 128, 20),  # a 16-bit scale and a 4-bit zero point
}


def named(name: str) -> WeightFormat:
    """A format by the name that --weights takes. Raises ``PlanError``."""
    if name not in NAMED:
        raise PlanError(f"Weights of {name!r} are unknown; the nearest is {nearest(name, NAMED)}.")
    return NAMED[name]


def of_config(name: str, quantization: Any) -> WeightFormat:
    """The format that a ``quantization_config`` describes. Raises ``PlanError`` for one that the planner lacks."""
    if not quantization:
        return PLAIN
    _object(name, "quantization_config", quantization)
    method = str(quantization.get("quant_method", ""))
    algorithm = str(quantization.get("quant_algo", "")).lower()
    ignored = tuple(
        pattern
        for field in ("modules_to_not_convert", "ignore", "ignored_layers", "exclude_modules")
        for pattern in _patterns(name, field, quantization.get(field))
    )
    if method.startswith(("awq", "gptq")):
        bits = _whole(name, quantization, "bits", quantization.get("w_bit", 4))
        group = quantization.get("group_size", quantization.get("q_group_size", 128))
        group = group if isinstance(group, int) and group > 0 else 0
        return WeightFormat(bits, group, 16 + bits, ignored=ignored)
    if "nvfp4" in (method, algorithm):
        return WeightFormat(4, 16, 8, ignored=ignored)
    if method == "mxfp4":
        return WeightFormat(4, 32, 8, experts_only=True)
    if method in ("fp8", "fbgemm_fp8") or algorithm == "fp8":
        return WeightFormat(8, ignored=ignored)
    listed = _object(name, "config_groups", quantization.get("config_groups"))
    groups = [
        _object(name, f"weights of {key}", _object(name, key, group).get("weights")) for key, group in listed.items()
    ]
    if groups and any("num_bits" in group for group in groups):
        bits_found = {_whole(name, group, "num_bits", None) for group in groups}
        if len(bits_found) > 1:
            raise PlanError(f"{name} mixes weights of {sorted(bits_found)} bits; say --weights fp8 or int4.")
        stored = bits_found.pop()
        given = groups[0].get("group_size")
        size = given if isinstance(given, int) and given > 0 else 0
        zero_point = 0 if groups[0].get("symmetric", True) else stored
        return WeightFormat(stored, size, 16 + zero_point, ignored=ignored)
    raise PlanError(f"{name} is quantised with {method!r}, which the planner does not know; say --weights fp8 or int4.")


def _object(name: str, field: str, value: Any) -> dict[str, Any]:
    """A field that is an object, or is missing. Raises ``PlanError``."""
    if value is None or isinstance(value, dict):
        return value or {}
    raise PlanError(f"The config of {name} makes no sense: {field} is {value!r}, and must be an object.")


def _patterns(name: str, field: str, value: Any) -> list[str]:
    """The names of modules in a field: one or a list of them. Raises ``PlanError``."""
    patterns = [value] if isinstance(value, str) else value or []
    if not isinstance(patterns, list) or not all(isinstance(each, str) for each in patterns):
        raise PlanError(f"The config of {name} makes no sense: {field} is {value!r}, and must be names of modules.")
    for pattern in patterns:
        try:
            re.compile(pattern.removeprefix("re:") if pattern.startswith("re:") else "")
        except re.error as error:
            raise PlanError(
                f"The config of {name} makes no sense: {pattern!r} in {field} is no pattern ({error})."
            ) from None
    return patterns


def _whole(name: str, config: dict[str, Any], field: str, default: Any) -> int:
    value = config.get(field, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 16:
        raise PlanError(f"The config of {name} is not enough: {field} is {value!r}, and must be a number of bits.")
    return value


@lru_cache(maxsize=4096)
def _ignores(patterns: tuple[str, ...], layer: int, name: str) -> bool:
    """Whether a pattern names one of the modules of a product. A pattern is a path or a part of one, has wildcards, or
    starts with "re:".
    """
    for module in MODULES[name]:
        path = f"model.layers.{layer}.{module}"
        for pattern in patterns:
            if pattern.startswith("re:"):
                found = re.match(pattern[3:], path) is not None
            elif "*" in pattern:
                found = fnmatch.fnmatchcase(path, pattern) or fnmatch.fnmatchcase(path, f"{pattern}.*")
            else:
                found = f".{pattern}." in f".{path}."
            if found:
                return True
    return False
