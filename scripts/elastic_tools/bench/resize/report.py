"""Writes what was found: tables for the terminal and the page, the numbers behind them, a picture."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from elastic_tools.bench import pages
from elastic_tools.bench.resize.cases import KINDS, TITLES, Sample, Settings
from elastic_tools.bench.resize.measure import CAPACITY, Measured

NAME = "resize"
MIB = 2**20


def middle(values: Iterable[float], digits: int = 1) -> str:
    """The median, and lowest to highest where there are several."""
    found = sorted(values)
    if not found:
        return "-"
    text = f"{median(found):,.{digits}f}"
    return text if len(found) == 1 else f"{text} ({found[0]:,.{digits}f} to {found[-1]:,.{digits}f})"


def groups(samples: Sequence[Sample]) -> list[tuple[str, int, list[Sample]]]:
    """By what was resized and by how much, in the order of the tables."""
    keys = sorted({(one.what, one.mib) for one in samples}, key=lambda key: (["grow", *KINDS].index(key[0]), key[1]))
    return [(what, mib, [one for one in samples if (one.what, one.mib) == (what, mib)]) for what, mib in keys]


def resizes(samples: Sequence[Sample]) -> str:
    """How long resizes take."""
    lines = [
        "| resize | MiB | times | outcome | MiB done | blocks evicted, moved | preempted | duration, ms | pause, ms |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for what, mib, found in groups(samples):
        answers = [one.answer for one in found]
        outcomes = sorted({answer["outcome"] for answer in answers})
        counts = [f"{median(answer[name] for answer in answers):.0f}" for name in ("evicted", "moved", "preempted")]
        cells = [TITLES[what], str(mib), str(len(found)), ", ".join(outcomes), middle(one.done_mib for one in found)]
        cells += [f"{counts[0]}, {counts[1]}", counts[2]]
        cells += [middle(answer[name] for answer in answers) for name in ("duration_ms", "pause_ms")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def quantiles(gaps: Sequence[float]) -> str:
    """Median, 99th percentile and maximum."""
    if not gaps:
        return "- | - | -"
    return " | ".join(f"{value:,.0f}" for value in np.quantile(np.asarray(gaps), [0.5, 0.99, 1.0]))


def clients(samples: Sequence[Sample]) -> str:
    """What clients see: the gaps that a resize falls into, and those just before it."""
    lines = [
        "| resize | MiB | gap before, ms: median | p99 | most | gap during, ms: median | p99 | most |",
        "|---|---|---|---|---|---|---|---|",
    ]
    rows = [(TITLES[what], str(mib), found) for what, mib, found in groups(samples)]
    for what, mib, found in [*rows, ("all", "", list(samples))]:
        quiet = [gap for one in found for gap in one.quiet_gaps_ms]
        during = [gap for one in found for gap in one.gaps_ms]
        lines.append(f"| {what} | {mib} | {quantiles(quiet)} | {quantiles(during)} |")
    return "\n".join(lines)


def moves(measured: Measured) -> str:
    """What a moved MiB costs, against copying it."""
    block_mib = measured.block_bytes / MIB
    plain = {
        mib: median(one.answer["pause_ms"] / one.done_mib for one in found if one.done_mib)
        for what, mib, found in groups(measured.samples)
        if what == "free" and any(one.done_mib for one in found)
    }
    costs = []
    for one in measured.samples:
        if one.answer["moved"] and one.mib in plain:
            pause = one.answer["pause_ms"] - plain[one.mib] * one.done_mib
            costs.append(pause / (one.answer["moved"] * block_mib))
    copied = f"Copying as many bytes, in rows of {measured.row_bytes:,} bytes as a block has in each layer, takes "
    copied += f"{measured.copy_ms_per_mib:.3f} ms per MiB."
    if not costs:
        return f"No resize moved a block. {copied}"
    factor = median(costs) / measured.copy_ms_per_mib
    return (
        f"A move takes {middle(costs, 3)} ms of pause per MiB moved, beyond what a shrink of free chunks of that size "
        f"takes. {copied} A move costs {factor:.1f} times that."
    )


def memory(measured: Measured) -> str:
    """What attaching and detaching take without an engine."""
    rounds = measured.pages[0]["rounds"] if measured.pages else 0
    return (
        f"An arena of {pages.SEGMENTS} segments on host memory, medians of {rounds} interleaved rounds.\n"
        "`memset` writes the same bytes once; what is made and released in the background holds nobody up.\n\n"
        f"{pages.table(measured.pages)}\n\n{pages.calls_table(pages.SIZES_MIB[-1], measured.calls)}"
    )


def sections(settings: Settings, machine: dict[str, Any], measured: Measured) -> list[str]:
    """The page, part by part. What other benchmarks have to say of a resize takes its place among them."""
    return [
        "# What a resize costs under load",
        f"## How long it takes\n{resizes(measured.samples)}",
        "Medians, and the lowest to the highest of the repeats. `duration` is from the request to the answer; `pause`\n"
        "is the part of it in which the engine could not compute. `MiB done` is less than was asked where the answer\n"
        "is `partial`.",
        f"![duration and pause of each resize]({NAME}.png)",
        f"## What clients see\n{clients(measured.samples)}",
        f"Times between two tokens of the {settings.decoders} requests that decode all the time: in the "
        f"{settings.quiet_s:.0f} s before each resize, and those\nthat a resize falls into.",
        f"## Moves\n{moves(measured)}",
        f"## Memory alone\n{memory(measured)}",
        f"## How it was measured\n{method(settings, measured)}\n\n{conditions(machine, measured)}",
    ]


def method(settings: Settings, measured: Measured) -> str:
    """How it was measured, in words."""
    return (
        f"A server with {measured.model} in float32, blocks of {measured.block_bytes:,} bytes, "
        f"{measured.chunk_blocks} to a chunk, a capacity of {CAPACITY}.\n"
        f"Each case grows the cache from {settings.floor_mib} MiB by its size, fills it, and shrinks it back:\n\n"
        "- free: nothing is in what leaves\n"
        "- cached: all of it was filled with prompts that have ended\n"
        "- moves: every block was taken by a request, then most were ended, so that every chunk has a block in use\n"
        "- preemption: the requests that run hold more blocks than what stays has room for\n\n"
        "The repeats of a case lie far apart, and every second round goes backwards."
    )


def conditions(machine: dict[str, Any], measured: Measured) -> str:
    """On what it was measured."""
    versions = ", ".join(f"{name} {version}" for name, version in measured.versions.items())
    rows = {
        "date": machine["date"],
        "command": f"`{machine['command']}`",
        "commit": machine["commit"],
        "processor": f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB",
        "system": f"{machine['kernel']}, Python {machine['python']}",
        "versions": versions,
    }
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])


def write(settings: Settings, machine: dict[str, Any], measured: Measured, folder: Path) -> list[Path]:
    """Writes the page, the numbers behind it and the picture. Returns what was written."""
    folder.mkdir(parents=True, exist_ok=True)
    page, numbers, picture = (folder / f"{NAME}.{suffix}" for suffix in ("md", "json", "png"))
    everything = {"schema": 1, "machine": machine, "settings": asdict(settings), "measured": asdict(measured)}
    numbers.write_text(json.dumps(_rounded(everything), default=float) + "\n")
    draw(measured.samples, picture)
    page.write_text("\n\n".join(sections(settings, machine, measured)) + "\n")
    return [page, numbers, picture]


def _rounded(value: Any) -> Any:
    """Floats to a thousandth: thousands of gaps are a large file otherwise."""
    if isinstance(value, dict):
        return {name: _rounded(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(part) for part in value]
    return round(value, 3) if isinstance(value, float) else value


def draw(samples: Sequence[Sample], path: Path) -> None:
    """Duration and pause of each resize over its size."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(11, 3.6), layout="constrained")
    for number, (what, title) in enumerate(TITLES.items()):
        found = [one for one in samples if one.what == what and one.done_mib]
        sizes = [one.done_mib * (0.9 + 0.05 * number) for one in found]  # side by side
        gaps = [max(one.gaps_ms, default=0.0) for one in found]
        values = ([one.answer["duration_ms"] for one in found], [one.answer["pause_ms"] for one in found], gaps)
        for axis, heights in zip(axes, values, strict=True):
            axis.plot(sizes, heights, "o", markersize=4, alpha=0.75, color=f"C{number}", label=title)
    for axis, title in zip(axes, ("duration", "pause of the engine", "longest gap of a client"), strict=True):
        axis.set(xscale="log", yscale="log", xlabel="MiB attached or detached")
        axis.set_title(f"{title}, ms", fontsize=10)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=7)
    figure.savefig(path, dpi=110, metadata={"Software": ""})
    pyplot.close(figure)
