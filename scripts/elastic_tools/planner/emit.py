"""A plan as the file that ``vllm serve --config`` reads."""

import json
from pathlib import Path
from typing import Any

import yaml

from elastic_tools.planner.errors import PlanError
from elastic_tools.planner.estimate import Estimate
from elastic_tools.planner.memory import UTILIZATION, Budget
from elastic_tools.planner.model import ModelConfig


def served(source: str, serve: str | None, model: ModelConfig) -> str:
    """What vLLM is to load: ``serve``, or what ``source`` names, an absolute path or a name on Hugging Face.

    Raises ``PlanError`` for a file that is no folder with a model.
    """
    if serve:
        return serve
    path = Path(source).expanduser()
    if path.name == "config.json" and path.is_file():
        path = path.parent
    if path.is_dir():
        return str(path.resolve())
    if not path.is_file() and model.hub:
        return model.hub
    raise PlanError(
        f"vLLM cannot load {source!r}: say with --serve what it is to load, a folder or a Hugging Face name."
    )


def longest(memory: Budget, most: int) -> int:
    """The longest request, up to ``most`` tokens, that a cache holds, the null block aside."""
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if memory.request_blocks(middle) < memory.blocks else (low, middle - 1)
    return low


def settings(found: Estimate, model: str, weights: str | None, policy: str | None) -> dict[str, Any]:
    """The options of ``vllm serve``. ``model`` is what vLLM is to load, ``weights`` what --weights asked for,
    ``policy`` that of an elastic cache.
    """
    plan = found.plan
    options: dict[str, Any] = {
        "model": model,
        "tensor-parallel-size": plan.tp,
        "kv-cache-dtype": plan.dtype.name,
        "max-model-len": longest(found.memory, plan.model.max_len),
        "max-num-batched-tokens": plan.step_tokens,
        "max-num-seqs": plan.step_sequences,
    }
    if plan.utilization != UTILIZATION:
        options["gpu-memory-utilization"] = plan.utilization
    if weights == "fp8":
        options["quantization"] = "fp8"
    if policy:
        options["elastic-kv-config"] = json.dumps({"policy": policy})
    return options


def as_yaml(found: Estimate, model: str, length: int, weights: str | None, elastic: bool, lend: bool) -> str:
    """The file, with what it was chosen for in comments. ``elastic`` asks for a cache that grows on demand,
    ``lend`` for one that borrows the activation reserve until a large step needs it.
    """
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
    policy = "reclaim" if lend else "on-demand" if elastic else None
    if policy:
        lines.append("# elastic-kv-config needs the patched engine.")
    return "\n".join(lines) + "\n" + yaml.safe_dump(settings(found, model, weights, policy), sort_keys=False)
