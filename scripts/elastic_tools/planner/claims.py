"""What paper B claims, and what the sweep says."""

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from elastic_tools.planner.checkpoint import load_model

if TYPE_CHECKING:
    from elastic_tools.planner.study import Cell, Pair

SMALL = 10e9  # parameters up to which a model counts as "7B"
FREE = "int4_per_token_head, free to read"
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
    """The longest context of the sweep that a model takes, and the longest at which one GPU with a 16-bit cache serves
    one request, and ``COMMON`` of them.
    """
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
            rows.append([model, name, f"{max(each.context for each in one):,}", *texts])
    return rows


def claim_rows(cells: Sequence["Cell"], found: Sequence["Pair"]) -> list[tuple[str, str, str]]:
    """Claim, data, verdict."""
    one = [pair for pair in found if pair.fewest == 1]
    top = best(one)
    fp8 = [pair for pair in one if pair.cache == "fp8"]
    crossed = sum(pair.gap < 1 for pair in top)
    crossed_free = sum(pair.gap < 1 for pair in one if pair.ideal or pair.cache == "fp8")
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
    rows = walls(cells)
    whole, many = (sum(row[2] == row[column] for row in rows) for column in (3, 4))
    long = sum(row[3] == "131,072" for row in rows)
    return [
        (
            "No crossover where the weights fit one GPU",
            crossover(found, True),
            "holds"
            if not crossed
            else "does not hold"
            if crossed_free
            else "holds for caches that cost what their bytes cost, and not for slow kernels",
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
            f"{whole} of {len(rows)} pairs of a model up to 10 B and a GPU hold one request of the longest context "
            f"that the model takes on one GPU, {long} of them one of 128k; {many} hold {COMMON} such requests",
            "holds for one request, not for many" if whole > many and whole * 2 > len(rows) else "see the table",
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
