"""More GPUs or a smaller cache: paper B's sweep, from the same memory and time models as every plan.

For each model, GPU and context length, the baseline is a 16-bit cache on the fewest GPUs that hold the weights. It
holds U requests. A relief r asks for r x U requests at a time, and there are two ways: a compressed cache on the same
GPUs, or more GPUs with the 16-bit cache. Both are priced at the same number of requests. Times are steady states by
arithmetic; ``check`` simulates some.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from elastic_tools.pins import ROOT
from elastic_tools.planner.cache import cache_dtype
from elastic_tools.planner.checkpoint import load_model
from elastic_tools.planner.errors import PlanError
from elastic_tools.planner.estimate import Plan, run, steady, times_of, users
from elastic_tools.planner.hardware import gpu, gpus
from elastic_tools.planner.regime import CONTEXTS, TPS
from elastic_tools.planner.workload import Lengths, Workload

RESULTS = ROOT / "docs" / "results"
MODELS = ("Llama-2-7B", "Qwen2.5-7B", "Llama-3.1-8B", "Qwen2.5-14B", "Qwen2.5-32B", "Llama-3.1-70B")
CACHES = ("fp8", "int8", "int4", "3bit")
RELIEFS = (1.25, 1.5, 2.0, 3.0, 4.0)
ANSWER = 0.125  # share of the context that is generated


@dataclass(frozen=True)
class Cell:
    """One plan at one context length: what it holds, and what it gives when it is full."""

    model: str
    gpu: str
    tp: int
    cache: str
    ideal: bool
    context: int
    users: float
    tokens: float | None  # output tokens a second
    tpot: float | None
    dollars: float | None


@dataclass(frozen=True)
class Pair:
    """A compressed cache against more GPUs at the same relief. ``gap`` above 1: compression is cheaper.

    ``replica_dollars`` is the third way: copies of the baseline, which hold ``relief`` times as much together.
    """

    model: str
    gpu: str
    context: int
    cache: str
    ideal: bool
    relief: float
    fewest: int
    tp: int
    requests: int
    compressed_dollars: float
    wider_dollars: float
    replica_dollars: float
    compressed_tpot: float
    wider_tpot: float

    @property
    def gap(self) -> float:
        """Cost with more GPUs over cost with a smaller cache."""
        return self.wider_dollars / self.compressed_dollars


def lengths(context: int) -> tuple[int, int]:
    """Prompt and answer of a request that ends at ``context`` tokens."""
    answer = int(context * ANSWER)
    return context - answer, answer


def price(plan: Plan, context: int, requests: int) -> tuple[float, float, float]:
    """Output tokens a second, TPOT in ms and dollars a million with ``requests`` requests at a time."""
    prompt, answer = lengths(context)
    found = steady(times_of(plan), plan.step_tokens, requests, prompt, answer)
    return found.tokens, found.tpot, plan.price / (found.tokens * 3600) * 1e6


def fits(plan: Plan, context: int) -> float:
    """Requests that the cache holds, at most as many as a step takes."""
    return min(users(plan.memory(), context), plan.step_sequences, plan.step_tokens - 1)


def study_one(job: tuple[str, str]) -> tuple[list[Cell], list[Pair]]:
    """Everything about one model on one GPU, up to the context that the model was made for."""
    model, device = load_model(job[0]), gpu(job[1])
    contexts = [context for context in CONTEXTS if context <= model.max_len]
    plain = [Plan(model, device, cache_dtype("bf16"), tp) for tp in TPS if model.tp_problem(tp) is None]
    plain = [plan for plan in plain if plan.memory().cache > 0]
    packed = [
        replace(plan, dtype=cache_dtype(cache), ideal=ideal)
        for plan in plain
        for cache in CACHES
        for ideal in ((False, True) if cache != "fp8" else (False,))
    ]
    cells = [cell(plan, context) for plan in [*plain, *packed] for context in contexts]
    return cells, [pair for context in contexts for pair in pairs(plain, packed, context)]


def cell(plan: Plan, context: int) -> Cell:
    """What a plan gives when its cache is full."""
    held = fits(plan, context)
    figures = price(plan, context, int(held)) if held >= 1 else (None, None, None)
    where = (plan.model.name, plan.gpu.name, plan.tp, plan.dtype.name, plan.ideal, context)
    return Cell(*where, users(plan.memory(), context), *figures)


def pairs(plain: Sequence[Plan], packed: Sequence[Plan], context: int) -> Iterator[Pair]:
    """Every relief that both a compressed cache and more GPUs can give."""
    base = next((plan for plan in plain if fits(plan, context) >= 1), None)
    if base is None:
        return
    copy = price(base, context, int(fits(base, context)))[2]
    for relief in RELIEFS:
        requests = int(relief * fits(base, context))
        if requests <= fits(base, context):
            continue
        wider = [plan for plan in plain if plan.tp > base.tp and fits(plan, context) >= requests]
        if not wider:
            continue
        options = [(price(plan, context, requests), plan) for plan in wider]
        (_, wider_tpot, wider_dollars), chosen = min(options, key=lambda each: each[0][2])
        for plan in packed:
            if plan.tp != base.tp or fits(plan, context) < requests:
                continue
            _, tpot, dollars = price(plan, context, requests)
            where = (plan.model.name, plan.gpu.name, context, plan.dtype.name, plan.ideal, relief, base.tp, chosen.tp)
            yield Pair(*where, requests, dollars, wider_dollars, copy, tpot, wider_tpot)


def sweep(workers: int | None = None) -> tuple[list[Cell], list[Pair]]:
    """The whole study, on all cores. The order does not depend on the number of processes."""
    from elastic_tools.planner.parallel import spread

    jobs = [(model, name) for model in MODELS for name in gpus()]
    parts = spread(study_one, jobs, "models x GPUs", workers)
    return [each for cells, _ in parts for each in cells], [each for _, found in parts for each in found]


def check(seed: int = 0) -> list[dict[str, Any]]:
    """Steady states by arithmetic beside the simulation, for a few cells."""
    rows = []
    for model, name, tp, cache, context in (
        ("Llama-3.1-8B", "H100", 1, "bf16", 8192),
        ("Llama-3.1-8B", "L40S", 1, "fp8", 8192),
        ("Qwen2.5-14B", "A100", 2, "int8", 16384),
        ("Llama-3.1-70B", "H200", 2, "3bit", 32768),
        ("Llama-2-7B", "A100", 1, "int4", 4096),
    ):
        plan = Plan(load_model(model), gpu(name), cache_dtype(cache), tp)
        prompt, answer = lengths(context)
        requests = max(1, int(0.9 * fits(plan, context)))
        work = Workload(Lengths(prompt), Lengths(answer), concurrency=requests)
        outcome = run(plan, plan.memory(), work, seed)
        tokens, tpot, _ = price(plan, context, requests)
        rows.append(
            {
                "plan": f"{model}, {tp} x {name}, {cache}, {context:,}",
                "requests": requests,
                "arithmetic_tokens_per_s": round(tokens, 1),
                "simulated_tokens_per_s": round(outcome.tokens, 1),
                "arithmetic_tpot_ms": round(tpot, 2),
                "simulated_tpot_ms": round(outcome.tpot["mean"], 2),
            }
        )
    return rows


def main(output: Path | None = None, workers: int | None = None) -> None:
    """Runs the study, prints the claims beside the data and writes the page, the data and the pictures."""
    from elastic_tools.planner import claims, plots, record, study_page
    from elastic_tools.planner.regime import cells as regime_cells

    if workers is not None and workers < 1:
        raise PlanError(f"--workers is {workers}, and must be 1 or more.")
    folder = output or RESULTS
    began = time.monotonic()
    cells, found = sweep(workers)
    taken = time.monotonic() - began
    checked = check()
    map_ = list(regime_cells())
    page = study_page.document(cells, found, checked, map_, list(regime_cells(allowed=0.0)))
    print(study_page.terminal(cells, found))
    print(f"\n{len(cells):,} plans and {len(found):,} comparisons in {taken:.0f} s")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "planner-study.md").write_text(page)
    tables = {
        "plans": compact([asdict(each) for each in cells if not each.ideal]),
        "comparisons": compact([asdict(each) for each in found]),
    }
    record.columns(folder / "planner-study.json", tables | {"checked": compact(checked)})
    record.columns(folder / "planner-regime.json", {"points": compact([each.as_row() for each in map_])})
    one = [pair for pair in found if pair.fewest == 1]
    speed = [(pair.cache, pair.compressed_tpot, pair.wider_tpot) for pair in one if not pair.ideal]
    plots.study(claims.gaps(one), speed, folder / "planner-study.png")
    plots.regime_map(map_, folder / "planner-regime.png")


def compact(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Rows as one list a column, rounded to four digits: a tenth of the size."""
    return {name: [_short(row[name]) for row in rows] for name in rows[0]}


def _short(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value
