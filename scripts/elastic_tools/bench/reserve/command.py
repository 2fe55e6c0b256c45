"""``scripts/bench reserve``."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from elastic_tools.bench import machine
from elastic_tools.bench.arms import BenchError
from elastic_tools.bench.report import RESULTS
from elastic_tools.bench.reserve import report
from elastic_tools.bench.reserve.measure import QUICK, Settings, measure


def main(arguments: Sequence[str]) -> int:
    """Runs it. The exit status says whether it ran, not what was found."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench reserve",
        description="Compares the policies of the prefill reserve under a memory budget. Takes minutes.",
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, once each")
    parser.add_argument("--rounds", type=int, help="rounds that count")
    parser.add_argument("--output", type=Path, default=RESULTS, help="where to write (default docs/results)")
    given = parser.parse_args(arguments)
    settings = QUICK if given.quick else Settings()
    if given.rounds is not None:
        settings = replace(settings, rounds=max(1, given.rounds))
    where = machine.describe()
    try:
        measured = measure(settings)
    except BenchError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    parts = [part(rounds) for rounds in measured.rounds.values() for part in (report.capacity, report.latencies)]
    print(
        "\n" + "\n\n".join([*parts, report.resizes(measured), report.crash(measured), report.by_ranks(measured)]) + "\n"
    )
    for path in report.write(settings, where, measured, given.output):
        print(f"written: {path}")
    return 0
