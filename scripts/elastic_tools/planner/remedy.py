"""What would make room for a plan that has none: the nearest choice that was tried and fits."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from elastic_tools.planner.cache import cache_problem
from elastic_tools.planner.emit import longest
from elastic_tools.planner.estimate import Plan, why_not
from elastic_tools.planner.hardware import gpus
from elastic_tools.planner.memory import GIB, UTILIZATION
from elastic_tools.planner.regime import TPS


def largest(plans: Sequence[Plan]) -> Plan:
    """The plan with the most memory."""
    return max(plans, key=lambda each: each.tp * each.gpu.memory)


def nowhere(plan: Plan, length: int) -> str:
    """The sentence for a model that does not fit, not even on ``plan``, the largest one that was offered."""
    memory = plan.memory()
    return (
        f"{plan.model.name} with requests of {length:,} tokens fits nowhere: on {plan.tp} x {plan.gpu.name} "
        f"its weights take {memory.weights / GIB:.1f} of {memory.requested / GIB:.1f} GiB a GPU, and steps and "
        f"framework {(memory.requested - memory.cache - memory.weights) / GIB:.1f}; {remedy(plan, length)}."
    )


def remedy(plan: Plan, length: int) -> str:
    """The nearest choice with which one request of ``length`` tokens fits, as a clause."""
    for options, other in choices(plan):
        if why_not(other, other.memory(), length) is None:
            return f"the nearest choice that fits is {options}"
    memory = plan.memory()
    if memory.cache > 0 and memory.request_blocks(1) < memory.blocks:
        return f"the nearest choice that fits is a request of {longest(memory, length):,} tokens"
    return "no choice of those in configs/hardware.toml fits"


def choices(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """Plans near ``plan``, as the options that differ: one option first, then all that a node can do."""
    if plan.utilization < UTILIZATION:
        yield f"--utilization {UTILIZATION:g}", replace(plan, utilization=UTILIZATION)
    if plan.step_tokens > plan.gpu.chunk:
        sequences = min(plan.step_sequences, plan.gpu.chunk)
        yield f"--chunk {plan.gpu.chunk}", replace(plan, chunk=plan.gpu.chunk, sequences=sequences)
    wider = [tp for tp in TPS if tp > plan.tp and plan.model.tp_problem(tp) is None]
    for tp in wider:
        yield f"--tp {tp}", replace(plan, tp=tp)
    lighter = [name for name, bits in (("fp8", 8), ("int4", 4)) if bits < plan.model.weights.bits]
    for name in lighter:
        model = plan.model.with_weights(name)
        if model.tp_problem(plan.tp) is None:
            yield f"--weights {name}", replace(plan, model=model)
    others = [
        gpu
        for gpu in sorted(gpus().values(), key=lambda each: each.memory)
        if gpu.memory > plan.gpu.memory and cache_problem(plan.model, plan.dtype, gpu.sm) is None
    ]
    for gpu in others:
        for tp in (plan.tp, *wider):
            options = f"--gpu {gpu.name}" + (f" --tp {tp}" if tp != plan.tp else "")
            yield options, replace(plan, gpu=gpu, tp=tp)
    gpu, tp = [plan.gpu, *others][-1], [plan.tp, *wider][-1]
    for name in lighter:
        model = plan.model.with_weights(name)
        if model.tp_problem(tp) is None:
            yield f"--gpu {gpu.name} --tp {tp} --weights {name}", replace(plan, model=model, gpu=gpu, tp=tp)
