"""Writes what the benchmark of the prefill reserve found."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from elastic_tools.bench.paired import BOOTSTRAPS, Ratio, ratio
from elastic_tools.bench.reserve.engine import DECODERS
from elastic_tools.bench.reserve.measure import CRASHING, MIB, MODEL, WORKLOADS, Measured, Settings
from elastic_tools.planner.checkpoint import load_model
from elastic_tools.planner.memory import activations
from elastic_tools.planner.record import table

NAME = "reserve"
REFERENCE = "static"
MODELS = ("Llama-3.1-8B", "Qwen2.5-14B", "Llama-3.1-70B")
TPS = (1, 2, 4, 8)
CHUNKS = (2048, 8192, 32768)


Rounds = dict[str, list[dict[str, Any]]]  # of one workload, by policy


def capacity(rounds: Rounds) -> str:
    """Blocks and tokens while only decoding is done, and what part of the reserve is in them."""
    rows = []
    for policy, each in rounds.items():
        states = [one["decoding"] for one in each]
        blocks = [state["blocks"]["resident"] for state in states]
        tokens = [one * states[0]["block_size"] for one in blocks]
        reserve = states[-1]["reserve"]
        rows.append(
            [
                policy,
                spread(blocks),
                spread(tokens),
                str(reserve["borrowed_blocks"]),
                f"{reserve['reserve_bytes'] / MIB:.0f} MiB",
            ]
        )
    return table(("policy", "blocks", "tokens", "blocks lent", "whole reserve"), rows, markdown=True)


def resizes(measured: Measured) -> str:
    """How long it takes to lend and to take back."""
    rows = []
    for workload, rounds in measured.rounds.items():
        for policy, each in rounds.items():
            done = [resize for one in each for resize in one["resizes"] if resize["outcome"] == "done"]
            for word, sign in (("lent", 1), ("taken back", -1)):
                these = [one for one in done if sign * (one["to"] - one["from"]) > 0]
                if these:
                    moved = [abs(one["to"] - one["from"]) for one in these]
                    numbers = [[one[name] for one in these] for name in ("evicted", "duration_ms", "pause_ms")]
                    told = [spread(one, digits) for one, digits in zip(numbers, (0, 1, 1), strict=True)]
                    rows.append([workload, policy, word, str(len(these)), spread(moved), *told])
    heads = ("cache", "policy", "", "times", "blocks", "evicted", "duration, ms", "pause of the engine, ms")
    return table(heads, rows, markdown=True)


def latencies(rounds: Rounds) -> str:
    """The first tokens of long prompts, and the tokens of those that decode meanwhile."""
    rows = []
    for policy, each in rounds.items():
        cells = [policy]
        for burst in range(len(each[0]["ttft_ms"])):
            compared = ratio(medians(each, burst), medians(rounds[REFERENCE], burst))
            cells += [spread([value for one in each for value in one["ttft_ms"][burst]], 0), against(compared)]
        cells.append(f"{np.quantile(first_tokens(each), 0.99):.0f}")
        cells.append(f"{max(gap for one in each for gap in one['busy_gaps_ms']):.0f}")
        cells.append(f"{np.median([gap for one in each for gap in one['quiet_gaps_ms']]):.1f}")
        rows.append(cells)
    bursts = [len(burst) for burst in next(iter(rounds.values()))[0]["ttft_ms"]]
    pairs = [(f"TTFT of {prompts} at once, ms", "against static") for prompts in bursts]
    heads = ("policy", *(name for pair in pairs for name in pair), "p99 of all", "longest gap, ms", "gap else, ms")
    return table(heads, rows, markdown=True)


def tail(rounds: Rounds) -> str:
    """Whether `adaptive` has a worse p99 of the TTFT than the better of the two policies that do not lend."""
    by_policy = {policy: [first_tokens([one]) for one in each] for policy, each in rounds.items()}
    count = len(by_policy["adaptive"])
    if count < 2:
        return "Whether `adaptive` has a worse p99 than the others takes more than one round to tell."
    draws = np.random.default_rng(0).integers(count, size=(BOOTSTRAPS // 10, count))

    def p99(policy: str, places: Any) -> float:
        return float(np.quantile(np.concatenate([by_policy[policy][place] for place in places]), 0.99))

    def compared(places: Any) -> float:
        return p99("adaptive", places) / min(p99("static", places), p99("small-chunk", places))

    low, high = np.quantile([compared(draw) for draw in draws], [0.025, 0.975])
    verdict = "worse by more than the noise" if low > 1 else "not worse beyond the noise"
    return (
        f"The p99 of `adaptive` is {compared(range(count)):.3f} times that of the better of `static` and `small-chunk` "
        f"({low:.3f} to {high:.3f}): {verdict}."
    )


def first_tokens(rounds: list[dict[str, Any]]) -> list[float]:
    """All times to a first token, in ms."""
    return [value for one in rounds for burst in one["ttft_ms"] for value in burst]


def medians(rounds: list[dict[str, Any]], burst: int) -> list[float]:
    """The median TTFT of a burst in each round."""
    return [float(np.median(one["ttft_ms"][burst])) for one in rounds]


def against(compared: Ratio) -> str:
    """A ratio with its interval."""
    low, high = compared.interval
    return f"{compared.median:.3f} ({low:.3f} to {high:.3f})"


def crash(measured: Measured) -> str:
    """What became of the engine that takes nothing back, in a sentence."""
    if "error" in measured.crash:
        return f"`{CRASHING}` died at the first long prompt: `{measured.crash['error']}`. No other policy did."
    return f"`{CRASHING}` lived, which it should not: there was memory that nobody accounted for."


def by_ranks(measured: Measured) -> str:
    """What engines measured as the reserve of a rank, by chunk and number of ranks."""
    rows = []
    for chunk, sizes in measured.reserves.items():
        one, *more = sizes.values()
        cells = [f"{one / MIB:.0f}", *(f"{size / MIB:.0f} ({size / one:.0%})" for size in more)]
        rows.append([f"{chunk:,}", *cells])
    ranks = next(iter(measured.reserves.values()))
    return table(("chunk", *(f"TP {tp}, MiB" for tp in ranks)), rows, markdown=True)


def melting() -> str:
    """What a rank keeps, computed by the planner's model of activations: GiB on a rank."""
    rows = []
    for name in MODELS:
        model = load_model(name)
        for chunk in CHUNKS:
            sizes = [activations(model, chunk, tp).total / 2**30 for tp in TPS]
            rows.append([name, f"{chunk:,}", *(f"{size:.2f}" for size in sizes)])
    return table(("model", "chunk", *(f"TP {tp}" for tp in TPS)), rows, markdown=True)


def spread(values: list[float] | list[int], digits: int = 0) -> str:
    """The median, and the extremes where they differ."""
    low, middle, high = (f"{value:,.{digits}f}" for value in (min(values), np.median(values), max(values)))
    return middle if low == high else f"{middle} ({low} to {high})"


def write(settings: Settings, machine: dict[str, Any], measured: Measured, folder: Path) -> list[Path]:
    """Writes the page, the numbers behind it and the picture. Returns what was written."""
    folder.mkdir(parents=True, exist_ok=True)
    page, numbers, picture = (folder / f"{NAME}.{suffix}" for suffix in ("md", "json", "png"))
    everything = {"schema": 1, "machine": machine, "settings": vars(settings), **vars(measured)}
    numbers.write_text(json.dumps(everything, indent=1) + "\n")
    draw(measured, picture)
    page.write_text(text(settings, machine, measured))
    return [page, numbers, picture]


def text(settings: Settings, machine: dict[str, Any], measured: Measured) -> str:
    """The page."""
    workloads = "\n".join(
        f"## The cache {WORKLOADS[name]}\nWhile requests decode:\n\n{capacity(rounds)}\n\n"
        f"Long prompts meanwhile:\n\n{latencies(rounds)}\n\n{tail(rounds)}\n"
        for name, rounds in measured.rounds.items()
    )
    bursts = " and ".join(map(str, settings.bursts))
    return f"""# What the prefill reserve gains, by policy

What it means is in [findings.md](../findings.md). Measured on a CPU, with a model that nobody would serve: the ratios
count, not the times.

{workloads}
## Lending and taking back
{resizes(measured)}

## Without taking back
{crash(measured)}

![first tokens]({NAME}.png)

## The reserve of one rank
Measured, for the model above, by engines that started with that chunk; in brackets what part of the reserve of a single
rank it is:

{by_ranks(measured)}

In GiB, computed by the formula in `scripts/elastic_tools/planner/memory.py`, not measured:

{melting()}

## Where lending gains more than a smaller chunk
The planner's map: [the picture](planner-regime.png), [the data](planner-regime.json).

## How it was measured
One process for each policy, each under a memory budget of {settings.room_mib} MiB beside what it has when vLLM is
imported. They work by turns, in orders that mirror each other: {settings.rounds} rounds after one of warm-up. In a
round, {bursts} prompts of {settings.most - 64:,} tokens come at once while {DECODERS} requests decode. Where the cache
is full, short prompts have filled it before each of those bursts. Steps have {settings.most:,} tokens at most,
{settings.small:,} with `small-chunk`. All policies gave the same tokens. Numbers are medians, with the extremes in
brackets; of ratios, the 95% interval of the median (of the p99: of itself), by bootstrap over the rounds.
The gap else has the time in it in which the reserve is lent. A loan that goes on when a round ends waits through the
turns of the others: that is where seconds come from.

| | |
|---|---|
| date | {machine["date"]} |
| command | `{machine["command"]}` |
| commit | {machine["commit"]} |
| model | {MODEL} |
| processor | {machine["cpu"]}, {machine["cores"]} cores, {machine["memory_gib"]} GiB |
| system | {machine["kernel"]}, Python {machine["python"]} |
"""


def draw(measured: Measured, path: Path) -> None:
    """The first token of every long prompt, and the blocks while only decoding is done, by policy."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(measured.rounds) + 1, figsize=(11, 3.2), layout="constrained")
    for axis, (workload, rounds) in zip(axes, measured.rounds.items(), strict=False):
        for place, each in enumerate(rounds.values()):
            values = [value / 1000 for value in first_tokens(each)]
            spots = [place + 0.3 * ((index + 0.5) / len(values) - 0.5) for index in range(len(values))]
            axis.plot(spots, values, "o", markersize=3, alpha=0.6, color=f"C{place}")
            axis.hlines(np.median(values), place - 0.28, place + 0.28, color=f"C{place}")
        axis.set_title(f"first token, s: a cache {WORKLOADS[workload]}", fontsize=9)
    rounds = next(iter(measured.rounds.values()))
    for place, each in enumerate(rounds.values()):
        axes[-1].bar(place, np.median([one["decoding"]["blocks"]["resident"] for one in each]), color=f"C{place}")
    axes[-1].set_title("blocks while requests decode", fontsize=9)
    for axis in axes:
        axis.set_xticks(range(len(rounds)), list(rounds), fontsize=8)
        axis.set_ylim(bottom=0)
    figure.savefig(path, dpi=110, metadata={"Software": ""})
    pyplot.close(figure)
