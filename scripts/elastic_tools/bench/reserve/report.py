"""Writes what the benchmark of the prefill reserve found."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from elastic_tools.bench.paired import ratio
from elastic_tools.bench.reserve.measure import CRASHING, MIB, MODEL, Measured, Settings
from elastic_tools.planner.checkpoint import load_model
from elastic_tools.planner.memory import activations
from elastic_tools.planner.record import table

NAME = "reserve"
REFERENCE = "static"
MODELS = ("Llama-3.1-8B", "Qwen2.5-14B", "Llama-3.1-70B")
TPS = (1, 2, 4, 8)
CHUNKS = (2048, 8192, 32768)


def capacity(measured: Measured) -> str:
    """Experiment a: blocks, tokens and requests of the longest length, while only decoding is done."""
    rows = []
    for policy, rounds in measured.rounds.items():
        states = [one["decoding"] for one in rounds]
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
    """Experiment b: how long it takes to lend and to take back."""
    rows = []
    for policy, rounds in measured.rounds.items():
        done = [each for one in rounds for each in one["resizes"] if each["outcome"] == "done"]
        for word, sign in (("lent", 1), ("taken back", -1)):
            these = [each for each in done if sign * (each["to"] - each["from"]) > 0]
            if these:
                moved = [abs(each["to"] - each["from"]) for each in these]
                times = [[each[name] for each in these] for name in ("duration_ms", "pause_ms")]
                rows.append([policy, word, str(len(these)), spread(moved), *(spread(one, 1) for one in times)])
    return table(("policy", "", "times", "blocks", "duration, ms", "pause of the engine, ms"), rows, markdown=True)


def latencies(measured: Measured) -> str:
    """Experiment d: the first token of long prompts, and the tokens of those that decode meanwhile."""
    rows = []
    names = ("ttft_ms", "busy_gaps_ms", "quiet_gaps_ms")
    for policy, rounds in measured.rounds.items():
        pooled = [[value for one in rounds for value in one[name]] for name in names]
        compared = ratio(medians(rounds), medians(measured.rounds[REFERENCE]))
        low, high = compared.interval
        rows.append(
            [
                policy,
                spread(pooled[0], 0),
                f"{np.quantile(pooled[0], 0.99):.0f}",
                f"{compared.median:.3f} ({low:.3f} to {high:.3f})",
                f"{max(pooled[1]):.0f}",
                f"{np.median(pooled[2]):.1f}",
            ]
        )
    heads = (
        "policy",
        "TTFT, ms",
        "p99",
        "against static, 95% interval",
        "longest gap of a decoder, ms",
        "gap else, ms",
    )
    return table(heads, rows, markdown=True)


def medians(rounds: list[dict[str, Any]]) -> list[float]:
    """The median TTFT of each round."""
    return [float(np.median(one["ttft_ms"])) for one in rounds]


def crash(measured: Measured) -> str:
    """Experiment c, in a sentence."""
    if "error" in measured.crash:
        return f"`{CRASHING}` died at the first long prompt: `{measured.crash['error']}`. No other policy did."
    return f"`{CRASHING}` lived, which it should not: there was memory that nobody accounted for."


def melting() -> str:
    """Experiment e, computed by the planner's model of activations: GiB on a rank."""
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
    return f"""# What the prefill reserve gains, by policy

What it means is in [findings.md](../findings.md). Measured on a CPU, with a model that nobody would serve: the ratios
count, not the times.

## a. The cache while requests decode
{capacity(measured)}

## b. Lending and taking back
{resizes(measured)}

## c. Without taking back
{crash(measured)}

## d. Long prompts at a busy decoder
{latencies(measured)}

![first tokens]({NAME}.png)

## e. The reserve of one rank, GiB
Computed, by the formula in `scripts/elastic_tools/planner/memory.py`; not measured.

{melting()}

## f. Where lending gains more than a smaller chunk
The planner's map: [the picture](planner-regime.png), [the data](planner-regime.json).

## How it was measured
One process for each policy, each under a memory budget of {settings.room_mib} MiB beside what it has when vLLM is
imported. They work by turns, in orders that mirror each other: {settings.rounds} rounds after one of warm-up,
{settings.prompts} prompts of {settings.most - 64:,} tokens in a round, each while 3 requests decode. Steps have
{settings.most:,} tokens at most, {settings.small:,} with `small-chunk`. All policies gave the same tokens. Numbers are
medians, with the extremes in brackets.

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

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
    names = list(measured.rounds)
    for place, (policy, rounds) in enumerate(measured.rounds.items()):
        values = [value / 1000 for one in rounds for value in one["ttft_ms"]]
        steps = [place + 0.3 * ((index + 0.5) / len(values) - 0.5) for index in range(len(values))]
        left.plot(steps, values, "o", markersize=3.5, alpha=0.7, color=f"C{place}")
        left.hlines(np.median(values), place - 0.28, place + 0.28, color=f"C{place}")
        blocks = [one["decoding"]["blocks"]["resident"] for one in rounds]
        right.bar(place, float(np.median(blocks)), color=f"C{place}")
        assert policy == names[place]
    for axis, title in ((left, "first token of a long prompt, s"), (right, "blocks while requests decode")):
        axis.set_xticks(range(len(names)), names, fontsize=8)
        axis.set_title(title, fontsize=10)
        axis.set_ylim(bottom=0)
    figure.savefig(path, dpi=110, metadata={"Software": ""})
    pyplot.close(figure)
