"""The decision: fewest GPUs that hold the weights, then a compressed cache, then a small chunk or the elastic
reserve.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from elastic_tools.planner.cache import CacheDtype, cache_dtype, cache_problem
from elastic_tools.planner.errors import PlanError
from elastic_tools.planner.estimate import Estimate, Plan, estimate, run
from elastic_tools.planner.hardware import GPU
from elastic_tools.planner.memory import GIB
from elastic_tools.planner.options import Question
from elastic_tools.planner.regime import TTFT_COST, regime
from elastic_tools.planner.remedy import largest, nowhere
from elastic_tools.planner.traffic import Loan, Outcome

TIE = 0.02  # plans whose cost differs by less count as equal, and the more exact cache wins


@dataclass(frozen=True)
class Decision:
    """The plan that was chosen, and one paragraph with its numbers for each step that led there."""

    chosen: Estimate
    steps: tuple[str, ...]
    considered: tuple[Estimate, ...]
    elastic: bool


Evaluate = Callable[[Plan], Estimate]


def recommend(asked: Question) -> Decision:
    """Decides for each GPU and takes the cheapest that keeps the SLOs. Raises ``PlanError`` where the model fits
    nowhere, and for several chunks: the decision looks for the chunk itself.
    """
    if len(asked.chunks) > 1:
        chunks, most = " ".join(map(str, asked.chunks)), max(chunk or 0 for chunk in asked.chunks)
        raise PlanError(
            f"--chunk is {chunks}, and a recommendation starts from one and looks for smaller ones itself; "
            f"the nearest is --chunk {most}."
        )
    known: dict[Plan, Estimate] = {}

    def evaluate(plan: Plan) -> Estimate:
        if plan not in known:
            known[plan] = estimate(plan, asked.workload, asked.seed)
        return known[plan]

    found = [decision for device in asked.gpus if (decision := on(asked, device, evaluate))]
    if not found:
        raise PlanError(nowhere(largest(asked.plans()), asked.workload.length))
    best = min(found, key=lambda each: (not each.chosen.met, each.chosen.dollars))
    if len(found) == 1:
        return best
    others = ", ".join(f"{each.chosen.plan.gpu.name} ${each.chosen.dollars:.3f}" for each in found)
    first = f"GPU: {best.chosen.plan.gpu.name}. Decided for each GPU alone, a million output tokens cost: {others}."
    every = tuple(each for decision in found for each in decision.considered)
    return replace(best, steps=(first, *best.steps), considered=every)


def on(asked: Question, device: GPU, evaluate: Evaluate) -> Decision | None:
    """The decision on one kind of GPU; None where the model does not fit."""
    auto = cache_dtype("auto")
    caches = [
        auto,
        *(each for each in asked.caches if each.bits < 16 and cache_problem(asked.model, each, device.sm) is None),
    ]
    sizes = sorted(tp for tp in set(asked.tps) if asked.model.tp_problem(tp) is None)
    chunk = asked.chunks[0]
    considered: list[Estimate] = []
    steps: list[str] = []

    def look(tp: int, dtype: CacheDtype) -> Estimate:
        found = evaluate(asked.plan(device, tp, dtype, chunk))
        considered.append(found)
        return found

    fitting = [tp for tp in sizes if any(look(tp, dtype).problem is None for dtype in caches)]
    if not fitting:
        return None
    least = fitting[0]
    steps.append(weights_step(asked, device, sizes, least, chunk))

    compressed = [look(least, dtype) for dtype in caches]
    chosen = cheapest(compressed)
    steps.append(cache_step(compressed, chosen))

    larger = [look(tp, dtype) for tp in fitting[1:] for dtype in dict.fromkeys((auto, chosen.plan.dtype))]
    if larger:
        steps.append(more_step([each for each in larger if each.plan.dtype is auto], chosen))
        chosen = wider(asked, chosen, larger, steps)
    elif not chosen.met:
        steps.append("Latency: no plan here keeps the SLOs; this one comes nearest. Relax them, or offer other GPUs.")
    chosen, reserve, elastic = reserve_step(asked, chosen, evaluate)
    steps.append(reserve)
    return Decision(chosen, tuple(steps), tuple({id(each): each for each in considered}.values()), elastic)


def wider(asked: Question, chosen: Estimate, larger: list[Estimate], steps: list[str]) -> Estimate:
    """The fewest GPUs, unless more of them keep SLOs that these cannot, or are cheaper. Adds what it decides to the
    steps.
    """
    best = cheapest(larger)
    few = f"{chosen.plan.tp} GPU{'s' * (chosen.plan.tp > 1)}"
    if best.met and not chosen.met:
        steps.append(
            f"Latency: {few} cannot keep the SLOs, so more GPUs: {label(best)} does, at ${best.dollars:.3f}. "
            "More GPUs buy latency; compression does not."
        )
        return best
    if not chosen.met:
        steps.append("Latency: no plan here keeps the SLOs; this one comes nearest. Relax them, or offer other GPUs.")
        return chosen
    if best.met and best.dollars < chosen.dollars * (1 - TIE):
        steps.append(
            f"More GPUs are cheaper here: {label(best)} at ${best.dollars:.3f} instead of "
            f"${chosen.dollars:.3f}, since weights "
            f"leave {few} only {chosen.memory.cache / GIB:.1f} GiB of "
            f"{chosen.memory.requested / GIB:.1f} for the cache, "
            f"or {chosen.users:.1f} requests of {asked.workload.length:,} tokens."
        )
        return best
    return chosen


def label(found: Estimate) -> str:
    """A plan in a few words."""
    return f"{found.plan.tp} x {found.plan.gpu.name} with a {found.plan.dtype.name} cache"


def cheapest(found: list[Estimate]) -> Estimate:
    """The cheapest that keeps the SLOs, else the cheapest; of equals the most exact cache."""
    open_ = [each for each in found if each.met] or [each for each in found if each.problem is None]
    least = min(each.dollars for each in open_)
    equal = [each for each in open_ if each.dollars <= least * (1 + TIE)]
    return min(equal, key=lambda each: (each.plan.dtype.quality, each.dollars))


def weights_step(asked: Question, device: GPU, sizes: list[int], least: int, chunk: int | None) -> str:
    """The fewest GPUs that hold the weights and one request."""
    texts = []
    for tp in [each for each in sizes if each <= least]:
        memory = asked.plan(device, tp, cache_dtype("auto"), chunk).memory()
        rest = memory.reserve.total + memory.graphs + memory.framework
        texts.append(
            f"{tp} x {device.name}: {memory.requested / GIB:.1f} - weights {memory.weights / GIB:.1f} "
            f"- the rest {rest / GIB:.1f} "
            f"= {memory.cache / GIB:.1f} GiB of cache"
        )
    fits = (
        "fit one GPU"
        if least == 1
        else f"need {least} GPUs"
        if least > sizes[0]
        else f"fit {least} GPUs, the fewest offered"
    )
    return f"Weights {fits}. {'; '.join(texts)}."


def cache_step(found: list[Estimate], chosen: Estimate) -> str:
    """What each cache gives on the fewest GPUs."""
    texts = []
    for each in found:
        if each.problem is not None:
            texts.append(f"{each.plan.dtype.name} does not fit")
            continue
        assert each.outcome is not None
        slos = "" if each.met else ", SLOs missed"
        texts.append(
            f"{each.plan.dtype.name} holds {each.users:.1f} requests, runs "
            f"{each.outcome.running:.0f}, {each.outcome.tokens:,.0f} tokens/s, ${each.dollars:.3f}{slos}"
        )
    keep = "keep the model's own type" if chosen.plan.dtype.bits == 16 else f"compress to {chosen.plan.dtype.name}"
    return (
        f"Cache: {keep}. ${chosen.plan.price:.3f} an hour / (3,600 x output tokens/s) x 1,000,000: {'; '.join(texts)}."
    )


def more_step(found: list[Estimate], chosen: Estimate) -> str:
    """What more GPUs with a plain cache would give."""
    texts = []
    for each in found:
        if each.outcome is not None:
            texts.append(f"TP {each.plan.tp} ${each.dollars:.3f} at a TPOT of {each.outcome.tpot['p90']:.1f} ms")
    assert chosen.outcome is not None
    return (
        f"More GPUs with a plain cache instead: {'; '.join(texts)}; against ${chosen.dollars:.3f} at "
        f"{chosen.outcome.tpot['p90']:.1f} ms."
    )


def reserve_step(asked: Question, chosen: Estimate, evaluate: Evaluate) -> tuple[Estimate, str, bool]:
    """Small chunk, elastic reserve, or neither."""
    prompt, output = round(asked.workload.prompt.mean), round(asked.workload.output.mean)
    found = regime(chosen.plan, prompt, output)
    assert found is not None
    share = max(found.small_gain, found.lent_gain) / found.tokens
    numbers = (
        f"the chunk of {found.chunk:,} keeps {chosen.memory.reserve.total / GIB:.2f} GiB; a chunk of "
        f"{found.small_chunk:,} gains "
        f"{found.small_gain:,.0f} tokens for {100 * found.cost:.1f}% of the TTFT (up to "
        f"{100 * TTFT_COST:.0f}% allowed), lending gains "
        f"{found.lent_gain:,.0f} = {found.lent_most:,.0f} x {found.idle:.2f} of the time; the cache "
        f"has {found.tokens:,}"
    )
    if found.verdict == "neither":
        return chosen, f"Reserve: leave it, {100 * share:.1f}% of the cache is too little to win: {numbers}.", False
    if found.verdict == "lend":
        lent = lend(asked, chosen, found.lent_blocks)
        assert chosen.outcome is not None
        text = f"{lent.tokens:,.0f} output tokens/s with it against {chosen.outcome.tokens:,.0f} without, simulated"
        if lent.tokens > chosen.outcome.tokens:
            return chosen, f"Reserve: lend it (--elastic-kv-config), {text}: {numbers}.", True
        return chosen, f"Reserve: leave it; lending gains tokens of cache, and no speed, {text}: {numbers}.", False
    sequences = min(chosen.plan.step_sequences, found.small_chunk)
    smaller = evaluate(replace(chosen.plan, chunk=found.small_chunk, sequences=sequences))
    if smaller.dollars > chosen.dollars * (1 + TIE) or (chosen.met and not smaller.met):
        text = f"Reserve: leave it; a smaller chunk gains tokens, and costs ${smaller.dollars:.3f} here: {numbers}."
        return chosen, text, False
    return smaller, f"Reserve: a chunk of {found.small_chunk:,} (${smaller.dollars:.3f}): {numbers}.", False


def lend(asked: Question, chosen: Estimate, blocks: int) -> Outcome:
    """The simulation of a plan whose reserve is lent as ``blocks`` more blocks while no step is larger than a decode
    step.
    """
    plan, workload = chosen.plan, asked.workload
    if not (workload.rate or workload.concurrency):
        held = (chosen.memory.blocks - 1 + blocks) // chosen.memory.request_blocks(workload.length)
        more = max(1, round((chosen.concurrency or 1) * held / max(1.0, chosen.users)))
        workload = replace(workload, concurrency=min(plan.step_sequences, more))
    return run(plan, chosen.memory, workload, asked.seed, Loan(blocks, min(plan.step_sequences, plan.step_tokens)))
