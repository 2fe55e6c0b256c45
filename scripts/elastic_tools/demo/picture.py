"""Draws the run."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from elastic_tools.demo.story import Resize
from elastic_tools.demo.watch import Sample

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MEMORY, CACHE, USED, TOKENS, RUNNING, WAITING, MARK = (
    "#1b4f9c", "#d1495b", "#edae9a", "#2e7d5b", "#5b5b8f", "#c9c9de", "#8a8a8a",
)  # fmt: skip
_SMOOTH = 3.0  # seconds over which tokens are counted


def draw(
    samples: Sequence[Sample], resizes: Sequence[Resize], block_bytes: int, path: Path, title: str, memory_name: str
) -> None:
    """Writes the picture: memory and cache above, speed and requests below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (upper, lower) = pyplot.subplots(
        2, 1, figsize=(11, 7), sharex=True, height_ratios=(5, 3), layout="constrained"
    )
    at = [sample.at for sample in samples]
    mib = block_bytes / 2**20

    used = [sample.used_blocks * mib for sample in samples]
    upper.fill_between(at, used, step="post", color=USED, linewidth=0, label="of these, used by running requests")
    resident = [sample.resident_blocks * mib for sample in samples]
    upper.plot(at, resident, color=CACHE, drawstyle="steps-post", label="resident blocks x bytes per block")
    upper.plot(at, [sample.memory / 2**20 for sample in samples], color=MEMORY, linewidth=1.8, label=memory_name)
    upper.set_ylabel("MiB")
    top = max(max(sample.memory / 2**20 for sample in samples), max(resident))
    upper.set_ylim(0, top * 1.3)
    upper.set_title(title, fontsize=11, loc="left")
    _mark(upper, resizes)
    _name(upper, resizes, mib, top * 1.28)
    handles, labels = upper.get_legend_handles_labels()
    upper.legend(handles[::-1], labels[::-1], loc="lower center", ncols=3, bbox_to_anchor=(0.5, -0.12), frameon=False)

    running = [sample.running for sample in samples]
    lower.fill_between(at, running, step="post", color=RUNNING, alpha=0.45, linewidth=0, label="running requests")
    waiting = [sample.running + sample.waiting for sample in samples]
    lower.fill_between(at, running, waiting, step="post", color=WAITING, linewidth=0, label="waiting requests")
    lower.set_ylabel("requests")
    lower.set_xlabel("seconds")
    speed = lower.twinx()
    speed.plot(at, tokens_per_second(samples), color=TOKENS, label="output tokens per second")
    speed.set_ylabel("tokens per second", color=TOKENS)
    for axes in (lower, speed):
        axes.set_ylim(bottom=0)
    _mark(lower, resizes)
    handles = [*lower.get_legend_handles_labels()[0], *speed.get_legend_handles_labels()[0]]
    lower.legend(handles=handles, loc="lower center", ncols=3, bbox_to_anchor=(0.5, 1.0), frameon=False)
    for axes in (upper, lower):
        axes.grid(axis="y", alpha=0.25)
        axes.set_xlim(0, max(at))
        axes.spines[["top", "right"]].set_visible(False)

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def tokens_per_second(samples: Sequence[Sample]) -> list[float]:
    """The speed at each sample, over the seconds before it."""
    speeds, first = [], 0
    for last in samples:
        while samples[first].at < last.at - _SMOOTH:
            first += 1
        since = samples[max(0, first - 1)]
        speeds.append((last.tokens - since.tokens) / (last.at - since.at) if last.at > since.at else 0.0)
    return speeds


def _mark(axes: "Axes", resizes: Sequence[Resize]) -> None:
    """A line where a resize was asked for, and grey until it was answered."""
    for resize in resizes:
        axes.axvspan(resize.started, resize.ended, color=MARK, alpha=0.2, linewidth=0)
        axes.axvline(resize.started, color=MARK, linewidth=0.8, linestyle="--")


def _name(axes: "Axes", resizes: Sequence[Resize], mib: float, height: float) -> None:
    """The size that was asked for, and the outcome where it was not had."""
    for resize in resizes:
        outcome = resize.answer["outcome"]
        axes.annotate(
            f"{resize.asked_blocks * mib:,.0f} MiB" + ("" if outcome == "done" else f"\n{outcome}"),
            (resize.started, height),
            xytext=(3, 0),
            textcoords="offset points",
            rotation=90,
            fontsize=8,
            color="#444444",
            va="top",
            ha="left",
        )
