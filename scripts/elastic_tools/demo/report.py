"""The summary: printed, and written as JSON beside the picture."""

import json
import platform
import statistics
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from elastic_tools.demo.load import Load
from elastic_tools.demo.verdict import Verdict
from elastic_tools.demo.watch import Sample

_MIB = 2**20


def problems(load: Load, verdict: Verdict, samples: Sequence[Sample]) -> list[str]:
    """What went wrong; empty where all is well."""
    found = [*load.failures]
    if not load.finished:
        found.append("no request was answered")
    if len(samples) < 2:
        found.append("the server could not be sampled")
    found += [f"resize '{row.what}' failed: {row.answer.get('reason')}" for row in verdict.failed_resizes]
    if not verdict.rows:
        found.append("no resize was answered")
    found += [
        f"resize '{row.resize.what}': memory changed by {row.measured / _MIB:+.1f} MiB where the cache changed by "
        f"{row.done / _MIB:+.1f} MiB; {verdict.allowed / _MIB:.1f} MiB of difference are allowed"
        for row in verdict.strayed
    ]
    return found


def print_summary(load: Load, verdict: Verdict, samples: Sequence[Sample], memory_name: str) -> None:
    """What happened, for people."""
    console = Console(width=None if Console().is_terminal else 130)
    table = Table("at", "resize", "outcome", "asked", "attached", "memory changed", "off by", title="Resizes, in MiB")
    for column in table.columns[3:]:
        column.justify = "right"
    for row in verdict.rows:
        table.add_row(
            f"{row.resize.started:.1f} s",
            row.resize.what,
            row.resize.answer["outcome"],
            *(f"{value / _MIB:+,.1f}" for value in (row.asked, row.done, row.measured, row.error)),
        )
    console.print(table)
    for name, value in figures(load, verdict, samples).items():
        console.print(f"{name.replace('_', ' '):>32}  {value}", highlight=False)
    console.print(f"{'memory is':>32}  {memory_name}", highlight=False)


def figures(load: Load, verdict: Verdict, samples: Sequence[Sample]) -> dict[str, Any]:
    """The run in a few numbers."""
    memory = [sample.memory / _MIB for sample in samples] or [0.0]
    correlation = verdict.correlation
    return {
        "requests_sent": load.sent,
        "requests_failed": len(load.failures),
        "output_tokens": load.tokens,
        "median_first_token_s": round(statistics.median(load.first_token_s or [0.0]), 2),
        "resizes": dict(Counter(row.resize.answer["outcome"] for row in verdict.rows)),
        "memory_peak_mib": round(max(memory), 1),
        "memory_lowest_mib": round(min(memory), 1),
        "memory_against_cache_correlation": None if correlation is None else round(correlation, 6),
        "largest_difference_mib": round(max((abs(row.error) / _MIB for row in verdict.rows), default=0.0), 2),
        "chunk_mib": round(verdict.chunk / _MIB, 2),
        "noise_mib": round(verdict.noise / _MIB, 2),
    }


def write_json(
    path: Path,
    command: str,
    settings: dict[str, Any],
    load: Load,
    verdict: Verdict,
    samples: Sequence[Sample],
    vllm_version: str,
) -> None:
    """How the picture came about."""
    report = {
        "command": command,
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": machine(),
        "versions": {"vllm": vllm_version, "python": platform.python_version(), **versions("torch", "openai")},
        "settings": settings,
        "summary": figures(load, verdict, samples),
        "resizes": [
            {
                "at_s": round(row.resize.started, 2),
                "what": row.resize.what,
                "asked_blocks": row.resize.asked_blocks,
                **{name: row.resize.answer[name] for name in ("outcome", "from", "to", "evicted", "reason")},
                **{name: round(row.resize.answer[name], 2) for name in ("duration_ms", "pause_ms")},
                "attached_mib": round(row.done / _MIB, 2),
                "memory_changed_mib": round(row.measured / _MIB, 2),
            }
            for row in verdict.rows
        ],
    }
    path.write_text(json.dumps(report, indent=1) + "\n")


def machine() -> dict[str, Any]:
    """What the run was made on."""
    names = [line.split(":", 1)[1].strip() for line in _cpuinfo() if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.machine(),
        "cores": psutil.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
    }


def versions(*names: str) -> dict[str, str]:
    """Installed versions."""
    return {name: metadata.version(name) for name in names}


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
