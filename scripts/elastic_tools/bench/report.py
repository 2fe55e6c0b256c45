"""Writes what the overhead benchmark found: a table for the terminal, and files under ``docs/results``."""

import json
from pathlib import Path
from statistics import mean, median
from typing import Any

from elastic_tools.bench.overhead import CONTROL, METRICS, Settings
from elastic_tools.bench.paired import Ratio
from elastic_tools.pins import ROOT

RESULTS = ROOT / "docs" / "results"
NAME = "off-overhead"
BAR = 0.01  # the loss that the design allows
QUIET = 0.1  # cores; above it, a difference of 1% says nothing
MIB = 2**20
TITLES = {"tokens_per_s": "throughput", "tpot_ms": "time per token"}
Comparison = dict[str, dict[str, Ratio]]


def table(comparison: Comparison, others: float) -> str:
    """The ratios as a Markdown table; ``others`` is what ``others_cores`` gives."""
    lines = [
        "| against unpatched | metric | median | 95% interval | quartiles | extremes | within 1% |",
        "|---|---|---|---|---|---|---|",
    ]
    for arm, metrics in comparison.items():
        for metric, found in metrics.items():
            judged = arm != CONTROL and others <= QUIET
            spans = [f"{low:.4f} to {high:.4f}" for low, high in (found.interval, found.quartiles, found.extremes)]
            cells = [arm, TITLES[metric], f"{found.median:.4f}", *spans]
            lines.append(f"| {' | '.join(cells)} | {found.verdict(BAR, METRICS[metric]) if judged else '-'} |")
    return "\n".join(lines)


def absolute(measured: dict[str, Any], warm_up: int) -> str:
    """What the arms did, as a Markdown table."""
    lines = ["| arm | tokens/s, median | time per token, median |", "|---|---|---|"]
    for arm, found in measured.items():
        speed, gap = (median(one[metric] for one in found["rounds"][warm_up:]) for metric in METRICS)
        lines.append(f"| {arm} | {speed:.1f} | {gap:.1f} ms |")
    return "\n".join(lines)


def idle_share(measured: dict[str, Any]) -> float:
    """The largest share of one core that an arm used while another one worked."""
    rounds = [one for arm in measured.values() for one in arm["rounds"]]
    share: float = max(one["idle_cpu_s"] / one["idle_s"] for one in rounds if one["idle_s"] > 1)
    return share


def others_cores(measured: dict[str, Any], warm_up: int) -> float:
    """How many cores work that is not ours kept busy, on average over the rounds that count."""
    cores: float = mean(one["others_cores"] for arm in measured.values() for one in arm["rounds"][warm_up:])
    return cores


def verdict(comparison: Comparison, others: float) -> str:
    """One sentence on the bar."""
    if others > QUIET:
        return f"Not judged: other work kept {others:.1f} cores busy during the rounds, which counts for more than 1%."
    found = {
        one.verdict(BAR, METRICS[metric])
        for arm, metrics in comparison.items()
        if arm != CONTROL
        for metric, one in metrics.items()
    }
    if found == {"holds"}:
        return "The bar of 1% holds: no interval reaches a loss of more than 1%."
    if "broken" in found:
        return "The bar of 1% is broken: an interval lies beyond a loss of 1%."
    return "Whether the bar of 1% holds is undecided: the intervals are wider than it. More rounds narrow them."


def write(
    settings: Settings, machine: dict[str, Any], measured: dict[str, Any], comparison: Comparison, folder: Path
) -> list[Path]:
    """Writes the page, the numbers behind it and the picture. Returns what was written."""
    folder.mkdir(parents=True, exist_ok=True)
    page, numbers, picture = (folder / f"{NAME}.{suffix}" for suffix in ("md", "json", "png"))
    ratios = {arm: {metric: one.as_json() for metric, one in found.items()} for arm, found in comparison.items()}
    everything = {"schema": 1, "machine": machine, "settings": vars(settings), "arms": measured, "ratios": ratios}
    numbers.write_text(json.dumps(everything, indent=1) + "\n")
    draw(comparison, picture)
    page.write_text(text(settings, machine, measured, comparison))
    return [page, numbers, picture]


def text(settings: Settings, machine: dict[str, Any], measured: dict[str, Any], comparison: Comparison) -> str:
    """The page."""
    others = others_cores(measured, settings.warm_up)
    versions = ", ".join(f"{name} {version}" for name, version in next(iter(measured.values()))["versions"].items())
    control = f"`{CONTROL}` is a second unpatched process. Its rows show how far apart two equal engines come out.\n"
    return f"""# What the patches cost where nothing is resized

{verdict(comparison, others)}

{table(comparison, others)}

A ratio is an arm's value divided by that of the unpatched engine in the same round. Above 1 is better for throughput,
below 1 for time per token. The last column judges the 95% interval of the median by a loss of 1%.
{control if settings.control else ""}
![ratios per round]({NAME}.png)

{absolute(measured, settings.warm_up)}

## How it was measured
Each arm is one process with an engine, started once. The arms run the same workload by turns, one at a time, in orders
that mirror each other. {settings.warm_up} rounds of warm-up are left out, {settings.rounds} count.

A round is {settings.requests} requests at once, {settings.tokens} greedy tokens each, SmolLM2-135M-Instruct, float32.
Each arm has a cache of {settings.cache_bytes / MIB:.0f} MiB; the elastic one may grow to \
{settings.capacity_bytes / MIB:.0f} MiB, and nobody asks it to.
All arms gave the same tokens. A waiting arm used at most {100 * idle_share(measured):.1f}% of a core.

| | |
|---|---|
| date | {machine["date"]} |
| command | `{machine["command"]}` |
| commit | {machine["commit"]} |
| processor | {machine["cpu"]}, {machine["cores"]} cores, {machine["memory_gib"]} GiB |
| other work meanwhile | {others:.2f} cores |
| system | {machine["kernel"]}, Python {machine["python"]} |
| versions | {versions} |
"""


def draw(comparison: Comparison, path: Path) -> None:
    """One dot per round and a bar for the median, per arm; a band for the bar of 1%."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(METRICS), figsize=(8, 3.2), layout="constrained")
    for axis, metric in zip(axes, METRICS, strict=True):
        axis.axhspan(1 - BAR, 1 + BAR, color="tab:green", alpha=0.15, linewidth=0)
        axis.axhline(1, color="grey", linewidth=0.8)
        for place, (arm, metrics) in enumerate(comparison.items()):
            rounds = metrics[metric].rounds
            spread = [place + 0.3 * ((index + 0.5) / len(rounds) - 0.5) for index in range(len(rounds))]
            axis.plot(spread, rounds, "o", markersize=3.5, alpha=0.7, color=f"C{place}", label=arm)
            axis.hlines(metrics[metric].median, place - 0.28, place + 0.28, color=f"C{place}")
        axis.set_xticks(range(len(comparison)), [arm.replace(", ", ",\n") for arm in comparison])
        axis.set_title(f"{TITLES[metric]}, ratio to unpatched", fontsize=10)
    figure.savefig(path, dpi=110, metadata={"Software": ""})
    pyplot.close(figure)
