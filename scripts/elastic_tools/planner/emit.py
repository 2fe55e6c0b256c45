"""A plan as the file that ``vllm serve --config`` reads."""

import json
from typing import Any

import yaml

from elastic_tools.planner.cache import KVLayout
from elastic_tools.planner.estimate import Estimate
from elastic_tools.planner.memory import UTILIZATION


def longest(layout: KVLayout, blocks: int, most: int) -> int:
    """The longest request, up to ``most`` tokens, that a cache of ``blocks`` blocks holds, the null block aside."""
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if layout.request_blocks(middle) <= blocks - 1 else (low, middle - 1)
    return low


def settings(found: Estimate, model: str, weights: str | None, elastic: bool) -> dict[str, Any]:
    """The options of ``vllm serve``. ``model`` is what vLLM is to load, ``weights`` what --weights asked for."""
    plan = found.plan
    options: dict[str, Any] = {
        "model": model,
        "tensor-parallel-size": plan.tp,
        "kv-cache-dtype": plan.dtype.name,
        "max-model-len": longest(found.memory.layout, found.memory.blocks, plan.model.max_len),
        "max-num-batched-tokens": plan.step_tokens,
        "max-num-seqs": plan.step_sequences,
    }
    if plan.utilization != UTILIZATION:
        options["gpu-memory-utilization"] = plan.utilization
    if weights == "fp8":
        options["quantization"] = "fp8"
    if elastic:
        options["elastic-kv-config"] = json.dumps({"policy": "on-demand"})
    return options


def as_yaml(found: Estimate, model: str, length: int, weights: str | None, elastic: bool) -> str:
    """The file, with what it was chosen for in comments."""
    plan, outcome = found.plan, found.outcome
    assert outcome is not None
    lines = [
        f"# {plan.model.name} on {plan.tp} x {plan.gpu.name}: {found.users:.0f} requests of {length:,} tokens fit;",
        f"# {outcome.tokens:,.0f} output tokens/s, ${found.dollars:.3f} a million, as scripts/plan estimates.",
    ]
    if plan.tp > 1:
        lines.append(f"# Needs {plan.tp} GPUs in one node.")
    if weights in ("int8", "int4"):
        lines.append(f"# model has to be a checkpoint with {weights} weights.")
    if elastic:
        lines.append("# elastic-kv-config needs the patched engine.")
    return "\n".join(lines) + "\n" + yaml.safe_dump(settings(found, model, weights, elastic), sort_keys=False)
