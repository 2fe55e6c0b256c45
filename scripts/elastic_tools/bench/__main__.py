"""``scripts/bench``: the command line of the benchmarks."""

import argparse
import sys
from pathlib import Path

from elastic_tools.bench import machine, overhead, report
from elastic_tools.bench.arms import BenchError
from elastic_tools.bench.driver import main as driver
from elastic_tools.bench.reserve.command import main as reserve
from elastic_tools.bench.resize.command import main as resize


def parser() -> argparse.ArgumentParser:
    """What can be asked for. Without a name, the overhead benchmark runs."""
    made = argparse.ArgumentParser(
        prog="scripts/bench",
        description="Compares the unpatched engine with the patched one, elastic off, and on but idle. Takes minutes.",
        epilog="Others: `scripts/bench resize`, what a resize costs while requests decode; "
        "`scripts/bench reserve`, what lending the prefill reserve gains; "
        "`scripts/bench driver`, a GPU driver's calls.",
    )
    made.add_argument("--rounds", type=int, default=84, help="rounds that count, 5 at least (default %(default)s)")
    made.add_argument("--warm-up", type=int, default=2, help="rounds before them (default %(default)s)")
    made.add_argument("--requests", type=int, default=16, help="requests per round (default %(default)s)")
    made.add_argument("--tokens", type=int, default=16, help="tokens per request (default %(default)s)")
    made.add_argument("--cache-mib", type=int, default=512, help="the cache of every arm (default %(default)s MiB)")
    made.add_argument("--capacity-mib", type=int, default=2048, help="of the elastic arm (default %(default)s MiB)")
    made.add_argument("--control", action="store_true", help="add a second unpatched arm, to see the noise")
    made.add_argument("--output", type=Path, default=report.RESULTS, help="where to write (default docs/results)")
    return made


def main() -> int:
    """Runs it. The exit status says whether it ran and the tokens were the same, not how fast the engines were."""
    if sys.argv[1:2] == ["driver"]:
        return driver(sys.argv[2:])
    if sys.argv[1:2] == ["reserve"]:
        return reserve(sys.argv[2:])
    if sys.argv[1:2] == ["resize"]:
        return resize(sys.argv[2:])
    given = parser().parse_args()
    if given.rounds < 5 or given.tokens < 2 or given.requests < 1 or given.warm_up < 0:
        parser().error("at least 5 rounds, 1 request and 2 tokens are needed")
    settings = overhead.Settings(
        rounds=given.rounds,
        warm_up=given.warm_up,
        requests=given.requests,
        tokens=given.tokens,
        cache_bytes=given.cache_mib * report.MIB,
        capacity_bytes=given.capacity_mib * report.MIB,
        control=given.control,
    )
    where = machine.describe()
    try:
        measured = overhead.measure(settings)
    except BenchError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    comparison = overhead.compare(measured, settings.warm_up)
    others = report.others_cores(measured, settings.warm_up)
    print(f"\n{report.table(comparison, others)}\n\n{report.absolute(measured, settings.warm_up)}\n")
    print(f"{report.verdict(comparison, others)}\nThe tokens of all arms are the same.")
    if (share := report.idle_share(measured)) > 0.02:
        print(f"A waiting arm used {100 * share:.0f}% of a core, so the arms disturbed each other.")
    for path in report.write(settings, where, measured, comparison, given.output):
        print(f"written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
