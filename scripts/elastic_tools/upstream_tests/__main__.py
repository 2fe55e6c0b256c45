"""``scripts/upstream-tests``: ``check`` judges the patched engine, ``baseline`` writes the list it is judged by."""

import argparse
import sys
import time

from elastic_tools.patchset.errors import Refusal
from elastic_tools.setup.show import SetupError
from elastic_tools.upstream_tests.lists import LIST, NOT_RUN, SUITE, misplaced, read_groups, read_list, write_list
from elastic_tools.upstream_tests.run import Failure, run_suite


def baseline(runs: int, everything: bool) -> str:
    """Writes the list from ``runs`` runs of the unpatched engine. Returns what to tell the user.

    A test is listed when it passes in all of them. Nothing is written where another one is not in ``not_run.toml``.
    """
    groups = read_groups()
    skip = [] if everything else [name for group in groups for name in group.tests]
    results = []
    for number in range(1, runs + 1):
        title = f"unpatched, run {number} of {runs}"
        result = run_suite("baseline", patched=False, title=title, skip=skip)
        if result.problem:
            raise Failure(f"{title}: {result.problem}")
        results.append(result)
    suite = results[-1].suite
    steady = set.intersection(*(result.passed for result in results))
    homeless = []
    for test in suite:
        left_out = any(group.holds(test) for group in groups)
        if test not in steady and not left_out:
            seen = [result.outcome(test) for result in results]
            why = next(one.message for one in seen if one.outcome != "passed")
            homeless.append(f"  {test}: {', '.join(one.outcome for one in seen)}: {why}")
        elif test in steady and left_out:
            print(f"{test} passes, though it is left out")
    if homeless:
        raise Failure(f"these do not pass unpatched; {NOT_RUN.name} must say why:\n" + "\n".join(homeless))
    listed = [test for test in suite if test in steady and not any(group.holds(test) for group in groups)]
    if wrong := misplaced(suite, listed, groups):
        raise Failure(f"{NOT_RUN.name} does not fit the suite:\n  " + "\n  ".join(wrong))
    write_list(listed)
    return (
        f"{len(listed)} of {len(suite)} tests passed unpatched, {runs} times; {len(suite) - len(listed)} are left out"
    )


def check() -> str:
    """Judges the patched engine by the list. Returns what to tell the user; raises ``Failure`` with the reasons."""
    listed, groups = read_list(), read_groups()
    begin = time.monotonic()
    result = run_suite("patched", patched=True, title="upstream's tests, patched", only=listed)
    if result.problem:
        raise Failure(f"upstream's tests did not run on the patched engine: {result.problem}")
    if wrong := misplaced(result.suite, listed, groups):
        raise Failure(f"{LIST.name} and {NOT_RUN.name} do not fit the suite:\n  " + "\n  ".join(wrong))
    broken = [test for test in listed if test not in result.passed]
    if broken:
        again = run_suite("comparison", patched=False, title="the same, unpatched", only=broken)
        lines = []
        for test in broken:
            outcome = result.outcome(test)
            other = "passes" if test in again.passed else "does not pass either (so look at the machine first)"
            lines.append(f"  {test}: {outcome.outcome}; unpatched it {other}\n    {outcome.message}")
        head = f"{len(broken)} of {len(listed)} tests that pass unpatched do not pass patched; see {result.log}"
        raise Failure(head + "\n" + "\n".join(lines))
    seconds = time.monotonic() - begin
    return f"all {len(listed)} tests that pass unpatched pass patched ({seconds:.0f} s)"


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="scripts/upstream-tests", description=f"Runs upstream's {SUITE}.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("check", help="judge the patched engine by the list")
    writer = verbs.add_parser("baseline", help="write the list anew, from the unpatched engine")
    writer.add_argument("--runs", type=int, default=2, help="in how many runs a test must pass (default 2)")
    writer.add_argument("--all", action="store_true", help="run the tests that are left out as well; takes an hour")
    arguments = parser.parse_args()
    try:
        print(check() if arguments.verb == "check" else baseline(arguments.runs, arguments.all))
    except (Failure, Refusal, SetupError, ValueError) as failure:
        print(f"upstream-tests: {failure}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
