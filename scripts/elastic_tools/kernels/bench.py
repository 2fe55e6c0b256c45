"""``scripts/kernels bench``: the decode kernel on a GPU, against other kernels and the memory's bandwidth."""

import argparse
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from elastic_tools.bench import machine
from elastic_tools.bench.paired import ratio
from elastic_tools.pins import ROOT

# Bytes of an element of the cache, and of the scale of a token and head.
CACHES = {"bf16": (2.0, 0), "fp8_e4m3": (1.0, 0), "int8": (1.0, 4), "int4": (0.5, 4)}
OURS = "ELASTIC_TRITON"


@dataclass(frozen=True)
class Point:
    """A batch of sequences of equal length that decode one token each."""

    batch: int
    context: int
    q_heads: int
    kv_heads: int
    cache: str
    head_size: int = 128
    block_size: int = 16

    def __str__(self) -> str:
        return f"{self.batch} x {self.context}, {self.q_heads}/{self.kv_heads} heads, {self.cache}"

    @property
    def cache_bytes(self) -> int:
        """Of all keys and values, with their scales."""
        element, scale = CACHES[self.cache]
        row = int(self.head_size * element) + scale
        return 2 * self.batch * self.context * self.kv_heads * row

    @property
    def call_bytes(self) -> int:
        """What a call has to move at least: the cache and the table once, the queries in and the outputs out."""
        table = 4 * self.batch * -(-self.context // self.block_size)
        return self.cache_bytes + table + 2 * self.batch * self.q_heads * self.head_size * 2


def grid(quick: bool) -> list[Point]:
    """Every batch with every context, kind of heads and format; without the largest caches where that is asked for."""
    heads = [(32, 8), (64, 8), (16, 16)]
    points = [
        Point(batch, context, *kind, cache)
        for batch in (1, 8, 64)
        for context in (1000, 8192, 32768)
        for kind in heads
        for cache in CACHES
    ]
    return [point for point in points if not quick or (point.batch * point.context <= 8192 and point.q_heads == 32)]


def interleaved(arms: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every arm in every round. Each round begins with another arm, so that none always follows the same."""
    names = list(arms)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            seconds[name].append(arms[name]())
    return seconds


@dataclass(frozen=True)
class Result:
    """Of one point. `absent`: arms that could not run there, and why."""

    point: Point
    seconds: dict[str, list[float]]
    absent: dict[str, str]
    bandwidth: float  # bytes a second that a copy of device memory reads and writes

    @property
    def share(self) -> float:
        """Of the memory's bandwidth, that our kernel reaches."""
        return self.point.call_bytes / self.bandwidth / median(self.seconds[OURS])

    def times(self, name: str) -> float | None:
        """How many times as long as ours an arm takes, the median of the rounds."""
        return ratio(self.seconds[name], self.seconds[OURS]).median if name in self.seconds else None


def table(results: Iterable[Result]) -> str:
    """Markdown, a line for each point."""
    results = list(results)
    others = sorted({name for result in results for name in [*result.seconds, *result.absent]} - {OURS})
    titles = ["batch", "MB", f"{OURS}, us", "of the bandwidth", *(f"{name}, times as long" for name in others)]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for result in results:
        cells = [str(result.point), f"{result.point.call_bytes / 1e6:.1f}"]
        cells += [f"{1e6 * median(result.seconds[OURS]):.1f}", f"{result.share:.0%}"]
        times = [result.times(name) for name in others]
        cells += ["-" if one is None else f"{one:.2f}" for one in times]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def write(results: list[Result], device: str, folder: Path) -> None:
    """The table as Markdown and all rounds as JSON."""
    absent = sorted({f"{name}: {why}" for result in results for name, why in result.absent.items()})
    about = [
        f"On {device}, a bandwidth of {results[0].bandwidth / 1e9:.0f} GB/s for copies.",
        "Median of the rounds; the arms take turns.",
        *(f"Left out where it does not run: {one}." for one in absent),
    ]
    text = f"# The decode kernel on a GPU\n\n{' '.join(about)}\n\n{table(results)}\n"
    (folder / "kernel-bench.md").write_text(text)
    report = {"machine": machine.describe(), "device": device, "results": [asdict(result) for result in results]}
    (folder / "kernel-bench.json").write_text(json.dumps(report) + "\n")


def main(arguments: list[str]) -> int:
    """Compares the decode kernel with upstream's Triton kernel, FlashAttention and FlashInfer, where they are present.

    Says that it skips, and does, where there is no CUDA device.
    """
    made = argparse.ArgumentParser(prog="scripts/kernels bench", description=main.__doc__)
    made.add_argument("--rounds", type=int, default=30, help="calls of every kernel that count (default %(default)s)")
    made.add_argument("--quick", action="store_true", help="small caches and one kind of heads only")
    made.add_argument("--output", type=Path, default=ROOT / "docs" / "results", help="default docs/results")
    given = made.parse_args(arguments)
    import torch

    if not torch.cuda.is_available():
        print("skipped: torch finds no CUDA device, and this benchmark measures nothing else")
        return 0
    from elastic_tools.kernels import bench_arms

    bandwidth = bench_arms.bandwidth(given.rounds)
    results = []
    for point in grid(given.quick):
        # Up to four caches of this size lie side by side, one of them in bf16.
        if 8 * point.cache_bytes > torch.cuda.get_device_properties(0).total_memory:
            continue
        arms, absent = bench_arms.arms(point)
        interleaved(arms, 3)
        results.append(Result(point, interleaved(arms, given.rounds), absent, bandwidth))
        print(table(results[-1:]).splitlines()[-1], flush=True)
    write(results, torch.cuda.get_device_name(), given.output)
    return 0
