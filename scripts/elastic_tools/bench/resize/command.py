"""``scripts/bench resize``."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from elastic_tools.bench import machine
from elastic_tools.bench.report import RESULTS
from elastic_tools.bench.resize import report
from elastic_tools.bench.resize.cases import FULL, QUICK
from elastic_tools.bench.resize.load import LoadError
from elastic_tools.bench.resize.measure import measure
from elastic_tools.demo.server import ServerError
from elastic_tools.model import smollm2


def main(arguments: Sequence[str]) -> int:
    """Runs it. The exit status says whether it ran, not how fast it was."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench resize",
        description="Resizes a server while requests decode: how long it takes and what clients see. Takes minutes.",
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, once each: under two minutes")
    parser.add_argument("--output", type=Path, default=RESULTS, help="where to write (default docs/results)")
    given = parser.parse_args(arguments)
    settings = QUICK if given.quick else FULL
    where = machine.describe()
    layers = json.loads((smollm2() / "config.json").read_text())["num_hidden_layers"]
    try:
        measured = measure(settings, layers)
    except (LoadError, ServerError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    print(f"\n{report.resizes(measured.samples)}\n\n{report.clients(measured.samples)}\n\n{report.moves(measured)}")
    for path in report.write(settings, where, measured, given.output):
        print(f"written: {path}")
    return 0
