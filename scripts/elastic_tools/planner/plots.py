"""The pictures: Pareto of cost against speed, the regime map, the study. Imports matplotlib, which takes a second."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.colors import ListedColormap
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

from elastic_tools.planner.estimate import Estimate
from elastic_tools.planner.regime import Regime

COLOURS = {"neither": "#d9d9d9", "small-chunk": "#4c9be8", "lend": "#e8804c"}
DOTS = ("o", "s", "^", "D", "v", "P", "X", "*")


def save(figure: Any, path: Path) -> None:
    """Writes a figure. The same figure gives the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None} if path.suffix == ".png" else None)
    plt.close(figure)


def ticks(axis: Any, values: Sequence[float]) -> None:
    """Plain numbers on a logarithmic axis."""
    axis.set_major_locator(FixedLocator(list(values)))
    axis.set_major_formatter(FixedFormatter([f"{value:g}" for value in values]))
    axis.set_minor_locator(NullLocator())


def frontier(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no other one beats in both figures, in order."""
    best: list[tuple[float, float]] = []
    for point in sorted(points):
        if not best or point[1] < best[-1][1]:
            best.append(point)
    return best


def pareto(found: Sequence[Estimate], path: Path) -> None:
    """Dollars for a million tokens against TPOT, and capacity per dollar, for plans that fit."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5.5), layout="constrained")
    gpus = list(dict.fromkeys(each.plan.gpu.name for each in found))
    for dot, name in zip(DOTS, gpus, strict=False):
        chosen = [each for each in found if each.plan.gpu.name == name and each.outcome]
        x = [each.outcome.tpot["p90"] for each in chosen if each.outcome]
        left.scatter(x, [each.dollars for each in chosen], marker=dot, label=name, alpha=0.7)
    points = [(each.outcome.tpot["p90"], each.dollars) for each in found if each.outcome]
    edge = frontier(points)
    left.plot([x for x, _ in edge], [y for _, y in edge], color="black", linewidth=1, label="no plan is better in both")
    left.set(xlabel="TPOT at p90, ms", ylabel="$ for a million output tokens", yscale="log", title="Cost against speed")
    left.legend()
    ranked = sorted(found, key=lambda each: each.users / each.plan.price)[-15:]
    names = [f"{each.plan.tp} x {each.plan.gpu.name}, {each.plan.dtype.name}" for each in ranked]
    right.barh(names, [each.users / each.plan.price for each in ranked], color="#4c9be8")
    right.set(xlabel="requests in the cache for a dollar an hour", title="Capacity per dollar, the best 15")
    save(figure, path)


def regime_map(found: Sequence[Regime], path: Path) -> None:
    """One panel for each chunk and TP: model down, prompt length across, coloured by the verdict."""
    models = list(dict.fromkeys(each.model for each in found))
    contexts = sorted({each.context for each in found})
    chunks = sorted({each.chunk for each in found})
    tps = sorted({each.tp for each in found})
    figure, axes = plt.subplots(
        len(chunks), len(tps), figsize=(4 * len(tps), 2.3 * len(chunks)), layout="constrained", squeeze=False
    )
    names = list(COLOURS)
    for row, chunk in enumerate(chunks):
        for column, tp in enumerate(tps):
            panel = axes[row][column]
            grid = [[float("nan")] * len(contexts) for _ in models]
            for each in found:
                if (each.chunk, each.tp) != (chunk, tp):
                    continue
                y, x = models.index(each.model), contexts.index(each.context)
                grid[y][x] = names.index(each.verdict)
                share = 100 * max(each.small_gain, each.lent_gain) / each.tokens
                panel.text(x, y, f"{share:.0f}%", ha="center", va="center", fontsize=7)
            panel.imshow(grid, cmap=ListedColormap(list(COLOURS.values())), vmin=0, vmax=2, aspect="auto")
            panel.set_title(f"chunk {chunk:,}, TP {tp}", fontsize=9)
            panel.set_xticks(range(len(contexts)), [f"{each // 1024}k" for each in contexts], fontsize=7)
            panel.set_yticks(range(len(models)), models if column == 0 else [""] * len(models), fontsize=7)
    handles = [Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS.values()]
    labels = ["neither gains 1% of the cache", "a smaller chunk gains more", "lending the reserve gains more"]
    figure.legend(handles, labels, loc="outside upper center", ncols=3, fontsize=9)
    figure.supxlabel(
        "prompt and answer; the number is the larger gain as a share of the cache; white: does not fit", fontsize=9
    )
    save(figure, path)


def study(gaps: dict[str, dict[float, list[float]]], speed: Sequence[tuple[str, float, float]], path: Path) -> None:
    """The cost gap over the relief needed, for each cache; and each pair's TPOT, more GPUs against a smaller cache."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5.5), layout="constrained")
    for (name, by_relief), dot in zip(gaps.items(), DOTS, strict=False):
        reliefs = sorted(relief for relief, values in by_relief.items() if values)
        middles = [sorted(by_relief[relief])[len(by_relief[relief]) // 2] for relief in reliefs]
        left.plot(reliefs, middles, marker=dot, label=name)
    left.axhline(1, color="black", linewidth=1)
    left.set(
        xlabel="relief: requests at a time, as a multiple of what 16 bit holds on one GPU",
        ylabel="cost with more GPUs / cost with a smaller cache",
        title="Cost gap, median; above 1 the smaller cache is cheaper",
        xscale="log",
        yscale="log",
    )
    ticks(left.xaxis, (1.25, 1.5, 2, 3, 4))
    ticks(left.yaxis, (0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3))
    left.legend(loc="center right", bbox_to_anchor=(1, 0.37), fontsize=8)
    for name, dot in zip(dict.fromkeys(each for each, _, _ in speed), DOTS, strict=False):
        pairs = [(compressed, wider) for each, compressed, wider in speed if each == name]
        right.scatter([x for x, _ in pairs], [y for _, y in pairs], marker=dot, s=12, alpha=0.5, label=name)
    every = [figure_ for _, compressed, wider in speed for figure_ in (compressed, wider)]
    limits = [min(every), max(every)]
    right.plot(limits, limits, color="black", linewidth=1)
    right.set(
        xlabel="TPOT with a smaller cache, ms",
        ylabel="TPOT with more GPUs, ms",
        xscale="log",
        yscale="log",
        title="Speed; below the line more GPUs are faster",
    )
    right.legend()
    save(figure, path)


def accuracy(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Estimated over measured, one dot for each point."""
    figure, panel = plt.subplots(figsize=(9, 5.5), layout="constrained")
    kinds = list(dict.fromkeys(row["quantity"] for row in rows))
    for dot, kind in zip(DOTS, kinds, strict=False):
        chosen = [row for row in rows if row["quantity"] == kind]
        x = [kinds.index(kind) + (n + 1) / (len(chosen) + 1) - 0.5 for n in range(len(chosen))]
        panel.scatter(x, [max(0.15, row["estimated"] / row["measured"]) for row in chosen], marker=dot)
    panel.axhline(1, color="black", linewidth=1)
    panel.set_xticks(range(len(kinds)), [kind.replace("_", " ") for kind in kinds], rotation=20)
    panel.set(ylabel="estimated / measured", yscale="log", title="The planner against published measurements")
    ticks(panel.yaxis, (0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 4))
    save(figure, path)
