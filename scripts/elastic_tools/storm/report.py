"""The result of a storm, as JSON and as a table."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from elastic_tools.bench import machine
from elastic_tools.storm.run import Evidence
from elastic_tools.storm.verdict import Verdict

SCHEMA = 1
MOST_RESIZES = 100  # of those that were not done, in the report


@dataclass(frozen=True)
class Spread:
    """A measured quantity in a few numbers."""

    count: int
    p50: float
    p99: float
    most: float


@dataclass(frozen=True)
class Figures:
    """How it went, in numbers."""

    seconds: float
    output_tokens: int
    tokens_per_s: float
    first_token_ms: Spread
    gap_ms: Spread
    resizes_per_s: float
    resize_ms: Spread
    pause_ms: Spread
    evicted: int
    moved: int
    preempted: int


def spread(values: Sequence[float], digits: int = 1) -> Spread:
    """Median, 99th percentile and maximum; zeros where there is nothing."""
    if not values:
        return Spread(0, 0.0, 0.0, 0.0)
    middle, high, most = np.quantile(np.asarray(values, dtype=float), [0.5, 0.99, 1.0])
    return Spread(len(values), *(round(float(value), digits) for value in (middle, high, most)))


def figures(seen: Evidence) -> Figures:
    """The numbers of a storm."""
    tokens = sum(record.count for record in seen.records)
    answers = [one.answer for one in seen.resizes if "to" in one.answer]
    return Figures(
        seconds=round(seen.seconds, 1),
        output_tokens=tokens,
        tokens_per_s=round(tokens / seen.seconds, 1) if seen.seconds else 0.0,
        first_token_ms=spread([1000 * one.first_token_s for one in seen.records if one.first_token_s is not None]),
        gap_ms=spread([1000 * gap for one in seen.records for gap in one.gaps_s]),
        resizes_per_s=round(len(answers) / seen.settings.seconds, 2),
        resize_ms=spread([answer["duration_ms"] for answer in answers]),
        pause_ms=spread([answer["pause_ms"] for answer in answers]),
        **{name: sum(answer[name] for answer in answers) for name in ("evicted", "moved", "preempted")},
    )


def as_json(seen: Evidence, verdict: Verdict, server: str, command: str) -> dict[str, Any]:
    """Everything that a reader needs to judge the result or to repeat it."""
    references = seen.references
    return {
        "schema": SCHEMA,
        "holds": verdict.holds,
        "machine": machine.describe() | {"command": command},
        "server": server,
        "settings": asdict(seen.settings),
        "sizes": asdict(seen.sizes),
        "references": {
            "usable": len(references.prompts),
            "shortened": references.shortened,
            "left_out": references.left_out,
            "unsteady": references.unsteady,
        },
        "checks": {name: {"holds": check.holds, **asdict(check)} for name, check in vars(verdict).items()},
        "figures": asdict(figures(seen)),
        "resizes_not_done": [asdict(one) for one in seen.resizes if one.answer.get("outcome") != "done"][:MOST_RESIZES],
        "memory": {"before": list(map(asdict, seen.before)), "after": list(map(asdict, seen.after))},
    }


def write(path: Path, report: dict[str, Any]) -> None:
    """Writes the JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")


def show(seen: Evidence, verdict: Verdict) -> None:
    """Prints the checks, the numbers, and what failed."""
    console = Console(width=None if Console().is_terminal else 130)
    table = Table("check", "", "found", title=f"A storm of {seen.settings.seconds:.0f} s")
    for name, check in vars(verdict).items():
        table.add_row(name.replace("_", " "), "holds" if check.holds else "FAILED", check.found)
    console.print(table)
    for name, value in vars(figures(seen)).items():
        text = f"median {value.p50}, p99 {value.p99}, most {value.most}" if isinstance(value, Spread) else value
        console.print(f"{name.replace('_', ' '):>16}  {text}", highlight=False)
    for name, check in vars(verdict).items():
        for wrong in check.wrong:
            console.print(f"FAILED: {name.replace('_', ' ')}: {wrong}", highlight=False, markup=False)
