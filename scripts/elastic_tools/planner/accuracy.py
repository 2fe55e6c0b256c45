"""The planner against what others measured and published: ``configs/measurements``."""

import statistics
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from elastic_tools.pins import ROOT
from elastic_tools.planner import plots, record
from elastic_tools.planner.cache import cache_dtype
from elastic_tools.planner.checkpoint import load_model
from elastic_tools.planner.errors import PlanError
from elastic_tools.planner.estimate import Plan, times_of, users
from elastic_tools.planner.hardware import gpu
from elastic_tools.planner.memory import GIB, UTILIZATION
from elastic_tools.planner.operators import Source
from elastic_tools.planner.simulate import Simulation
from elastic_tools.planner.traffic import Engine, Outcome, Request

MEASUREMENTS = ROOT / "configs" / "measurements"
RESULTS = ROOT / "docs" / "results"
ROUNDS = 4
PREFILL = "prefill attention, uncut prompts"
FIELDS = {
    "source", "engine", "use", "note", "gpu", "model", "weights", "cache", "tp", "chunk", "prompt", "output",
    "requests", "concurrency", "sequences", "no_evict", "length", "utilization", "card", "memory_gib", "measured",
}  # fmt: skip


@dataclass(frozen=True)
class Point:
    """One published figure and the planner's. ``use`` is "calibration" or "hold-out"."""

    run: dict[str, Any]
    quantity: str
    measured: float
    estimated: float
    interior: bool

    @property
    def error(self) -> float:
        """How far off, as a share of what was measured."""
        return self.estimated / self.measured - 1

    @property
    def use(self) -> str:
        """Whether a constant of the planner was chosen by this figure."""
        return str(self.run.get("use", "hold-out"))

    def row(self) -> dict[str, Any]:
        """The figures, for JSON."""
        kept = {name: value for name, value in self.run.items() if name != "measured"}
        return kept | {
            "use": self.use,
            "interior": self.interior,
            "quantity": self.quantity,
            "measured": self.measured,
            "estimated": round(self.estimated, 4),
            "error": round(self.error, 4),
        }


def runs(folder: Path = MEASUREMENTS) -> list[dict[str, Any]]:
    """Every published run, in the order of the files."""
    found = []
    for path in sorted(folder.glob("*.toml")):
        with open(path, "rb") as file:
            for run in tomllib.load(file)["run"]:
                if extra := set(run) - FIELDS:
                    raise PlanError(
                        f"{path.name} has a run with the field {extra.pop()!r}, which the planner does not know."
                    )
                found.append(run)
    return found


def plan_of(run: dict[str, Any]) -> Plan:
    """The plan that a run was made with; vLLM's defaults where it does not say."""
    device = gpu(run["gpu"])
    if "card" in run:
        device = replace(device, name=run["card"], memory=round(run["memory_gib"] * GIB))
    return Plan(
        load_model(run["model"], run.get("weights")),
        device,
        cache_dtype(run.get("cache", "auto")),
        run.get("tp", 1),
        run.get("chunk"),
        run.get("sequences"),
        utilization=run.get("utilization", UTILIZATION),
    )


def replay(plan: Plan, run: dict[str, Any]) -> Outcome:
    """The simulation of a run: all requests at once, or ``concurrency`` at a time. With ``no_evict`` the engine lets in
    only what it can finish, and preempts nobody. Of a run of more than ``ROUNDS`` times the requests that run together
    so many are simulated.
    """
    memory = plan.memory()
    sequences = plan.step_sequences
    if run.get("no_evict"):
        sequences = max(1, min(sequences, int(users(memory, run["prompt"] + run["output"]))))
    engine = Engine(times_of(plan), memory.layout, memory.blocks, plan.step_tokens, sequences)
    count = min(run["requests"], ROUNDS * sequences)
    requests = [Request(0.0, run["prompt"], run["output"]) for _ in range(count)]
    return Simulation(engine, requests, run.get("concurrency")).run()


def estimates(run: dict[str, Any]) -> dict[str, float]:
    """What the planner says of each figure that a run published."""
    plan = plan_of(run)
    memory = plan.memory()
    found: dict[str, float] = {
        "weights_gib": memory.weights / GIB,
        "cache_tokens": memory.tokens(run.get("length", plan.model.max_len)),
    }
    if "prompt" in run:
        outcome = replay(plan, run)
        found["output_tokens_per_s"] = outcome.tokens
        for name, values in (("ttft", outcome.ttft), ("tpot", outcome.tpot)):
            found |= {f"{name}_{share}_ms": values[share] for share in ("mean", "p50")}
    return {name: found[name] for name in run["measured"]}


def interior(run: dict[str, Any]) -> bool:
    """Whether matrix products, attention, experts and all-reduce of a run lie inside the measured tables. A prompt that
    is longer than a step is cut, which was not measured; memory has no tables.
    """
    if "prompt" not in run:
        return False
    plan = plan_of(run)
    sources = times_of(plan).sources()
    wanted = {"attention projections", "MLP", "experts", "all-reduce", "decode attention", PREFILL} & set(sources)
    return run["prompt"] <= plan.step_tokens and all(sources[name] < Source.MODELLED for name in wanted)


def points(every: Sequence[dict[str, Any]]) -> list[Point]:
    """All figures of all runs, on all cores. The order does not depend on the number of processes."""
    from elastic_tools.planner.parallel import spread

    found = []
    for run, estimated in zip(every, spread(estimates, every, "runs"), strict=True):
        inside = interior(run)
        found += [Point(run, name, float(value), estimated[name], inside) for name, value in run["measured"].items()]
    return found


def quantile(values: Sequence[float], share: float) -> float:
    """A percentile of absolute errors; of few values the nearest one above."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def summary(found: Sequence[Point]) -> list[list[str]]:
    """Rows: which points, how many, median and 90th percentile of the absolute error, and the median with its sign."""
    groups: list[tuple[str, list[Point]]] = [
        ("calibration", [point for point in found if point.use == "calibration"]),
        ("hold-out, all", [point for point in found if point.use != "calibration"]),
    ]
    held = groups[1][1]
    timed, memory = [p for p in held if "prompt" in p.run], [p for p in held if "prompt" not in p.run]
    ours = [point for point in timed if point.run["engine"].startswith("vLLM")]
    groups += [
        ("times, inside the measured tables", [point for point in timed if point.interior]),
        ("times, outside of them", [point for point in timed if not point.interior]),
        ("times, vLLM", ours),
        ("times, another engine", [point for point in timed if point not in ours]),
        ("memory", memory),
    ]
    for quantity in dict.fromkeys(point.quantity for point in held):
        groups.append((quantity, [point for point in held if point.quantity == quantity]))
    for name in dict.fromkeys(point.run["gpu"] for point in timed):
        groups.append((f"times on {name}", [p for p in timed if p.run["gpu"] == name]))
    for name in dict.fromkeys(point.run["gpu"] for point in ours):
        groups.append((f"times on {name}, vLLM", [p for p in ours if p.run["gpu"] == name]))
    rows = []
    for name, chosen in groups:
        if chosen:
            size = [abs(point.error) for point in chosen]
            middle = statistics.median(point.error for point in chosen)
            figures = (statistics.median(size), quantile(size, 0.9))
            rows.append(
                [name, str(len(chosen)), *(f"{100 * value:.1f}%" for value in figures), f"{100 * middle:+.1f}%"]
            )
    return rows


HEAD = ("points", "count", "median error", "p90 error", "median with sign")


def document(found: Sequence[Point]) -> str:
    """The page in docs/results."""
    lines = [
        "# The planner against published measurements",
        "",
        "Made by `make plan-accuracy` from `configs/measurements`; the figures of every point with its source are in "
        "[planner-accuracy.json](planner-accuracy.json). An error is the estimate over the measurement, less one. "
        "Calibration: a constant of the planner was chosen by it; the rest is held out. Inside: the operators of the "
        "run lie inside the measured tables; outside: at least one is modelled, such as the attention of a prompt that "
        "is cut.",
        "",
        record.table(HEAD, summary(found), markdown=True),
        "",
        "![Estimated over measured](planner-accuracy.png)",
        "",
        "## Every point",
        "",
    ]
    rows = []
    for point in found:
        run = point.run
        work = f"{run['prompt']:,} in, {run['output']:,} out" if "prompt" in run else "-"
        load = str(run.get("concurrency", "all at once")) if "prompt" in run else "-"
        values = (f"{point.measured:,.2f}", f"{point.estimated:,.2f}", f"{100 * point.error:+.1f}%")
        rows.append(
            [
                run["model"],
                f"{run.get('tp', 1)} x {run.get('card', run['gpu'])}",
                run["engine"].split(",")[0],
                work,
                load,
                point.quantity,
                *values,
                "calibration" if point.use == "calibration" else "inside" if point.interior else "outside",
            ]
        )
    head = ("model", "GPUs", "engine", "tokens", "at a time", "figure", "measured", "estimated", "error", "tables")
    return "\n".join([*lines, record.table(head, rows, markdown=True), ""])


def main(output: Path | None = None) -> None:
    """Prints the errors and writes the page, the data and the picture."""
    folder = output or RESULTS
    found = points(runs())
    print(record.table(HEAD, summary(found)))
    rows = [point.row() for point in found]
    record.to_json(folder / "planner-accuracy.json", rows)
    (folder / "planner-accuracy.md").write_text(document(found))
    plots.accuracy(rows, folder / "planner-accuracy.png")
