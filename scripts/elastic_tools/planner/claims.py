"""What paper B claims, and what the sweep says: the tables of ``scripts/plan study``."""

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from elastic_tools.planner.checkpoint import load_model
from elastic_tools.planner.record import table
from elastic_tools.planner.regime import Regime, summary

if TYPE_CHECKING:
    from elastic_tools.planner.study import Cell, Pair

SMALL = 10e9  # parameters up to which a model counts as "7B"
FREE = "int4_per_token_head, free to read"
WHY = """\
A compressed cache that costs what its bytes cost always wins where the weights fit one GPU. Published kernels do
not all read that fast. fp8 does: it is measured on three of the four GPUs, and a decode step is faster with it than
with 16 bit. The formats with a scale for each token and head are modelled at 1.28 (int8) and 1.65 (int4) times the
attention of 16 bit, and 3-bit TurboQuant at 8 times, from the pull requests that
`scripts/elastic_tools/planner/operators.py` names: their fewer bytes buy room, and not speed. So where decode
attention fills most of a step (long contexts, many requests), more GPUs with a 16-bit cache can be cheaper than a
small cache that is slow to read. "Free to read" below are the same formats at the cost of their bytes: with them
the paper's result comes out."""
COMMON = 64  # requests at a time that one GPU should serve before a context length counts as a wall


def gaps(found: Sequence["Pair"]) -> dict[str, dict[float, list[float]]]:
    """Cost gaps by cache and relief; a cache whose dequantisation is taken to be free has a line of its own."""
    lines: dict[str, dict[float, list[float]]] = {}
    for pair in found:
        name = f"{pair.cache}, free to read" if pair.ideal else pair.cache
        lines.setdefault(name, {}).setdefault(pair.relief, []).append(pair.gap)
    return lines


def gap_rows(found: Sequence["Pair"]) -> list[list[str]]:
    """For each cache and relief: comparisons, how many of them more GPUs win, and the gap."""
    rows = []
    for name, by_relief in gaps(found).items():
        for relief, values in sorted(by_relief.items()):
            lost = sum(value < 1 for value in values)
            figures = (min(values), statistics.median(values), max(values))
            rows.append([name, f"{relief:g}", str(len(values)), str(lost), *(f"{value:.2f}" for value in figures)])
    return rows


GAP_HEAD = ("cache", "relief", "comparisons", "more GPUs cheaper", "least gap", "median", "largest")


def crossover(found: Sequence["Pair"], fits_one: bool) -> str:
    """The first claim: where the weights fit one GPU, more GPUs are never cheaper."""
    chosen = [pair for pair in found if (pair.fewest == 1) is fits_one]
    parts = []
    for name, keep in (
        ("fp8", [p for p in chosen if p.cache == "fp8"]),
        ("all caches, free to read", [p for p in chosen if p.ideal or p.cache == "fp8"]),
        ("all caches, dequantisation as published", [p for p in chosen if not p.ideal]),
        ("best cache of each comparison", best(chosen)),
    ):
        if keep:
            lost = sum(pair.gap < 1 for pair in keep)
            parts.append(f"{name}: more GPUs are cheaper in {lost} of {len(keep)}")
    return "; ".join(parts)


def best(found: Sequence["Pair"]) -> list["Pair"]:
    """The cheapest compressed cache, dequantisation as published, for each model, GPU, context and relief."""
    chosen: dict[tuple[Any, ...], Pair] = {}
    for pair in found:
        key = (pair.model, pair.gpu, pair.context, pair.relief)
        if not pair.ideal and (key not in chosen or pair.gap > chosen[key].gap):
            chosen[key] = pair
    return list(chosen.values())


def capacity(cells: Sequence["Cell"]) -> tuple[list[float], list[float]]:
    """Requests in the cache for a dollar an hour, at one model and context; two readings of the claim.

    First, on each GPU: the smallest cache on the fewest GPUs, over 16 bit on the most. Second, over all GPUs: the best
    plan with a compressed cache, over the worst with 16 bit.
    """
    from elastic_tools.planner.hardware import gpus

    price = {name: each.price for name, each in gpus().items()}
    held = [(each, each.users / (each.tp * price[each.gpu])) for each in cells if not each.ideal and each.users >= 1]
    narrow, wide = [], []
    for key in dict.fromkeys((each.model, each.context) for each, _ in held):
        here = [(each, value) for each, value in held if (each.model, each.context) == key]
        plain = [(each, value) for each, value in here if each.cache == "bfloat16"]
        packed = [(each, value) for each, value in here if each.cache != "bfloat16"]
        if plain and packed:
            wide.append(max(value for _, value in packed) / min(value for _, value in plain))
        for name in dict.fromkeys(each.gpu for each, _ in plain):
            sizes = {each.tp: value for each, value in plain if each.gpu == name}
            small = [value for each, value in packed if each.gpu == name and each.tp == min(sizes)]
            if len(sizes) > 1 and small:
                narrow.append(max(small) / sizes[max(sizes)])
    return narrow, wide


def walls(cells: Sequence["Cell"]) -> list[list[str]]:
    """The longest context at which one GPU with a 16-bit cache serves one request, and ``COMMON`` of them."""
    rows = []
    for model in dict.fromkeys(each.model for each in cells):
        if load_model(model).parameters > SMALL:
            continue
        for name in dict.fromkeys(each.gpu for each in cells):
            one = [c for c in cells if (c.model, c.gpu, c.tp, c.cache) == (model, name, 1, "bfloat16")]
            texts = []
            for wanted in (1, COMMON):
                fit = [each.context for each in one if each.users >= wanted]
                texts.append(f"{max(fit):,}" if fit else "none")
            rows.append([model, name, *texts])
    return rows


def claim_rows(cells: Sequence["Cell"], found: Sequence["Pair"]) -> list[tuple[str, str, str]]:
    """Claim, data, verdict."""
    one = [pair for pair in found if pair.fewest == 1]
    top = best(one)
    fp8 = [pair for pair in one if pair.cache == "fp8"]
    crossed = sum(pair.gap < 1 for pair in top)
    by_relief: dict[float, list[float]] = {}
    for pair in top:
        by_relief.setdefault(pair.relief, []).append(pair.gap)
    medians = {relief: statistics.median(values) for relief, values in sorted(by_relief.items())}
    free = {relief: statistics.median(values) for relief, values in sorted(gaps(one)[FREE].items())}
    grows, grows_free = (list(each.values()) == sorted(each.values()) for each in (medians, free))
    narrow, wide = capacity(cells)
    copies = sum(pair.replica_dollars < pair.compressed_dollars for pair in top)
    fp8_copies = sum(pair.replica_dollars < pair.compressed_dollars for pair in fp8)
    as_published = [pair for pair in one if not pair.ideal]
    faster = sum(pair.wider_tpot < pair.compressed_tpot for pair in as_published)
    slow = slower()
    return [
        (
            "No crossover where the weights fit one GPU",
            crossover(found, True),
            "holds" if not crossed else "holds for caches that cost what their bytes cost, and not for slow kernels",
        ),
        (
            "The cost gap grows with the relief needed, up to about 2x",
            "median gap of the best cache: "
            + ", ".join(f"{value:.2f} at {relief:g}x" for relief, value in medians.items())
            + "; of int4 that is free to read: "
            + ", ".join(f"{value:.2f}" for value in free.values())
            + f"; largest with published kernels {max(pair.gap for pair in top):.2f}, "
            f"with fp8 alone {max(pair.gap for pair in fp8):.2f}",
            "holds" if grows else "holds for a cache that costs what its bytes cost" if grows_free else "does not hold",
        ),
        (
            "(Beside the paper: copies of the server instead of tensor parallelism)",
            f"copies with a 16-bit cache are cheaper than fp8 in {fp8_copies} of {len(fp8)} "
            "comparisons, and than the best compressed "
            f"cache in {copies} of {len(top)}",
            "fp8 wins where it can give the relief" if not fp8_copies else "copies can win",
        ),
        (
            "About 16x more users per hardware dollar",
            "requests in the cache per dollar, smallest cache on the fewest GPUs over 16 bit on the "
            "most, on the same kind of GPU: "
            f"median {statistics.median(narrow):.1f}, largest {max(narrow):.1f}; best plan over the "
            "worst 16-bit plan, whatever the GPU: "
            f"median {statistics.median(wide):.1f}, largest {max(wide):.1f}",
            "reached between the best and the worst plan, not on one kind of GPU"
            if max(wide) >= 16 > max(narrow)
            else "holds"
            if max(narrow) >= 16
            else "not reached",
        ),
        (
            "Context alone is seldom the wall for 7B",
            f"{sum(row[2] == '131,072' for row in walls(cells))} of {len(walls(cells))} pairs of a "
            "model up to 10 B and a GPU hold "
            "one request of 128k on one GPU",
            "holds" if sum(row[2] == "131,072" for row in walls(cells)) * 2 > len(walls(cells)) else "does not hold",
        ),
        (
            "Tensor parallelism is faster, compression is slower",
            f"more GPUs have the lower TPOT in {faster} of {len(as_published)} comparisons; on the "
            "same GPUs and requests, " + "; ".join(slow),
            "holds" if faster > 0.9 * len(as_published) else "holds in part",
        ),
    ]


def slower() -> list[str]:
    """How much slower one decode step is with each cache, at the same requests: H100, Llama-3.1-8B, 8k, 32 requests."""
    from elastic_tools.planner.cache import cache_dtype
    from elastic_tools.planner.estimate import Plan, times_of
    from elastic_tools.planner.hardware import gpu

    plans = {
        name: Plan(load_model("Llama-3.1-8B"), gpu("H100"), cache_dtype(name))
        for name in ("bf16", "fp8", "int8", "int4", "3bit")
    }
    steps = {name: times_of(plan).step(32, 8192, []) for name, plan in plans.items()}
    return [f"{name} takes {ms / steps['bf16']:.2f} of bf16's step" for name, ms in steps.items() if name != "bf16"]


def terminal(cells: Sequence["Cell"], found: Sequence["Pair"]) -> str:
    """The claims beside the data, and the gaps."""
    lines = []
    for claim, data, verdict in claim_rows(cells, found):
        lines += [f"Claim: {claim}.", f"  Data: {data}.", f"  Verdict: {verdict}.", ""]
    return "\n".join([*lines, table(GAP_HEAD, gap_rows([pair for pair in found if pair.fewest == 1]))])


def reserve(map_: Sequence[Regime], strict: Sequence[Regime]) -> str:
    """Paper A's claim about the reserve beside the map, and beside the map in which no TTFT may be lost."""
    lent, lent_strict = ([each for each in found if each.verdict == "lend"] for found in (map_, strict))
    least = min((each.chunk for each in lent_strict), default=0)
    largest = max(each.chunk for each in map_)
    model = map_[0].model
    shares = {e.tp: e.lent_most / e.tokens for e in map_ if (e.model, e.chunk, e.context) == (model, largest, 8192)}
    melting = ", ".join(f"{100 * share:.0f}% at TP {tp}" for tp, share in shares.items())
    return (
        "Paper A claims that a smaller chunk recovers more than lending, that the reserve melts "
        "under tensor parallelism, and that "
        "lending pays for small models with very long prompts and no tensor parallelism only. The "
        "first two hold: lending gains "
        f"more in {len(lent)} of {len(map_)} points, and what a chunk of {largest:,} tokens keeps "
        f"from the cache of {model} falls "
        f"from {melting}. The third does not come out: by measured operator times a prompt loses next "
        "to nothing when it is cut, "
        "since its steps stay bound by computation, so a smaller chunk wins without tensor "
        "parallelism too. Where no TTFT at all "
        f"may be lost, lending gains more in {len(lent_strict)} of {len(strict)} points, all with "
        f"chunks of {least:,} tokens or more."
    )


def document(
    cells: Sequence["Cell"],
    found: Sequence["Pair"],
    checked: Sequence[dict[str, Any]],
    map_: Sequence[Regime],
    strict: Sequence[Regime],
) -> str:
    """The page in docs/results."""
    one = [pair for pair in found if pair.fewest == 1]
    losers = Counter((pair.cache, pair.gpu) for pair in one if pair.gap < 1 and not pair.ideal)
    rows = [[f"{cache} on {name}", str(count)] for (cache, name), count in losers.most_common()]
    checks = [[str(value) for value in row.values()] for row in checked]
    lines = [
        "# More GPUs or a smaller cache",
        "",
        "Made by `make plan-study`. Nothing here was run on a GPU: memory and times are the "
        "planner's, with the errors that "
        "[planner-accuracy.md](planner-accuracy.md) states. Prices are those of "
        "`configs/hardware.toml`. Terms: the relief is "
        "the number of requests at a time, as a multiple of what a 16-bit cache holds on the fewest "
        "GPUs; the gap is the cost with "
        "more GPUs over the cost with a smaller cache, at the same requests; an eighth of the context is generated.",
        "",
        "## The claims beside the data",
        "",
        "| claim | data | verdict |",
        "|---|---|---|",
        *(f"| {claim} | {data} | {verdict} |" for claim, data, verdict in claim_rows(cells, found)),
        "",
        "## Where the data disagrees, and why",
        "",
        WHY,
        "",
        table(("more GPUs are cheaper (weights fit one GPU)", "comparisons"), rows, markdown=True) if rows else "",
        "",
        "## The cost gap",
        "",
        "Weights fit one GPU:",
        "",
        table(GAP_HEAD, gap_rows(one), markdown=True),
        "",
        "Weights need several GPUs (the fewest that hold them is the base):",
        "",
        table(GAP_HEAD, gap_rows([pair for pair in found if pair.fewest > 1]), markdown=True),
        "",
        "![Cost gap and speed](planner-study.png)",
        "",
        "## Is context the wall?",
        "",
        table(("model", "GPU", "longest context, 1 request", f"{COMMON} requests"), walls(cells), markdown=True),
        "",
        "## Where lending the reserve gains more than a smaller chunk",
        "",
        "H100, 16-bit cache, 512 output tokens, a smaller chunk may cost 1% of the TTFT; counts of points. Data: "
        "[planner-regime.json](planner-regime.json).",
        "",
        reserve(map_, strict),
        "",
        "```",
        summary(map_),
        "```",
        "",
        "![The regime map](planner-regime.png)",
        "",
        "## Arithmetic and simulation",
        "",
        "The sweep takes steady states by arithmetic. The discrete-event simulation beside it, for a few plans:",
        "",
        table(("plan", "requests", "tokens/s", "simulated", "TPOT ms", "simulated"), checks, markdown=True),
        "",
    ]
    return "\n".join(lines)
