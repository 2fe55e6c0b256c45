"""Runs checks within a time, and writes what came of them as JUnit XML."""

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import httpx
import pynvml
from junitparser import Error, Failure, JUnitXml, TestCase, TestSuite
from junitparser import Skipped as SkippedCase

from elastic_tools.smoke.checks import Check, Smoke
from elastic_tools.smoke.client import Failed, Skipped

FOUNDATIONS = ("health", "state", "completion")  # without these, the others cannot be told


class Ended(BaseException):
    """It is to end at once, whatever it waits for; the message says why."""


@contextlib.contextmanager
def may_be_ended(seconds: float) -> Iterator[None]:
    """Raises `Ended` in the block when the time is over, and on Ctrl-C and SIGTERM. In the main thread alone."""
    reasons = {
        signal.SIGALRM: f"not done within {seconds:g} s",
        signal.SIGINT: "interrupted",
        signal.SIGTERM: "ended by SIGTERM",
    }

    def end(signum: int, _: object) -> None:
        raise Ended(reasons[signal.Signals(signum)])

    before = {number: signal.signal(number, end) for number in reasons}
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def run(
    title: str, checks: Sequence[tuple[str, Check]], smoke: Smoke, say: Callable[[str], None], suite: TestSuite
) -> None:
    """Runs the checks in order, and adds a case for each. After a failed foundation or a lost server, none runs."""
    suite.name = title
    broken: str | None = None
    for name, check in checks:
        case = TestCase(name, classname=f"smoke.{title}".replace(" ", "_"))
        begin = time.monotonic()
        if broken:
            case.result = [SkippedCase(f"not run, since {broken} failed")]
        else:
            try:
                case.system_out = check(smoke)
            except Skipped as reason:
                case.result = [SkippedCase(str(reason))]
            except Failed as reason:
                case.result = [Failure(str(reason))]
            except Ended as why:
                case.result = [Error(str(why))]
                _add(suite, case, begin, say)
                raise
            except httpx.HTTPError as error:
                case.result = [Failure(f"no answer from {smoke.client.http.base_url}: {type(error).__name__}: {error}")]
                if isinstance(error, httpx.ConnectError):
                    broken = name  # the server is gone, and no other check would say more
            except (LookupError, TypeError, ValueError, OSError, pynvml.NVMLError) as error:  # another form, no meter
                case.result = [Failure(f"{type(error).__name__}: {error}")]
        if name in FOUNDATIONS and not (case.is_passed or broken):
            broken = name
        _add(suite, case, begin, say)


def add_error(suite: TestSuite, name: str, why: str, say: Callable[[str], None]) -> None:
    """A case that could not even begin."""
    case = TestCase(name, classname="smoke")
    case.result = [Error(why)]
    _add(suite, case, time.monotonic(), say)


def add_skipped(suite: TestSuite, name: str, why: str, say: Callable[[str], None]) -> None:
    """A case that makes no sense here."""
    case = TestCase(name, classname="smoke")
    case.result = [SkippedCase(why)]
    _add(suite, case, time.monotonic(), say)


def write(suites: Sequence[TestSuite], path: Path) -> bool:
    """Writes the JUnit file. Returns whether something passed and nothing failed."""
    report = JUnitXml("smoke")
    for suite in suites:
        report.add_testsuite(suite)
    report.update_statistics()
    path.parent.mkdir(parents=True, exist_ok=True)
    report.write(str(path), pretty=True)
    passed = report.tests - report.failures - report.errors - report.skipped
    return bool(passed > 0 and report.failures + report.errors == 0)


def _add(suite: TestSuite, case: TestCase, begin: float, say: Callable[[str], None]) -> None:
    for result in case.result:  # XML has no place for most control characters, which a server may well send
        result.message = "".join(one if one.isprintable() or one == "\n" else " " for one in result.message)
    case.time = round(time.monotonic() - begin, 3)
    suite.add_testcase(case)
    words = {SkippedCase: "skipped", Failure: "FAILED", Error: "FAILED"}
    outcome, told = "ok", case.system_out or ""
    for result in case.result:
        if type(result) in words:
            outcome, told = words[type(result)], result.message
    say(f"{outcome:8} {case.name}: {told} ({case.time:.1f} s)")
