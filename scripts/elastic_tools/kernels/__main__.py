"""``scripts/kernels``: the ahead-of-time gate, and the benchmark on a GPU."""

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from elastic_tools.kernels.bench import main as bench
from elastic_tools.kernels.compiling import TARGETS
from elastic_tools.kernels.sweep import rows_for
from elastic_tools.pins import ROOT


def main() -> int:
    """Compiles for every target, each in a process of its own. Fails where the gate does not pass."""
    if sys.argv[1:2] == ["bench"]:
        return bench(sys.argv[2:])
    made = argparse.ArgumentParser(prog="scripts/kernels", description=main.__doc__)
    made.epilog = "`scripts/kernels bench`: the benchmark on a GPU."
    made.add_argument("--targets", nargs="+", choices=list(TARGETS), default=list(TARGETS))
    made.add_argument("--only", default="", help="configurations whose name has this in it")
    made.add_argument(
        "--output", type=Path, default=ROOT / "docs" / "results", help="where to write (default docs/results)"
    )
    given = made.parse_args()
    # A process that dies raises here, and is not replaced.
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        rows = [row for part in pool.map(rows_for, given.targets, [given.only] * len(given.targets)) for row in part]
    if not rows:
        made.error(f"no configuration has {given.only!r} in its name")
    from elastic_tools.kernels.table import write

    write(rows, given.output, " ".join(["scripts/kernels", *sys.argv[1:]]))
    bad = [row for row in rows if row.faults]
    for row in bad:
        print(f"{row.target} {row.case}: {', '.join(row.faults)}", file=sys.stderr)
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
