"""A pytest plugin for runs of upstream's tests: checks the engine, picks the tests, writes down every outcome.

``UPSTREAM_RUN`` is a directory with a ``plan.json``: ``{"engine": where vllm must come from, "patched": bool, "only":
test ids or null, "skip": test ids, or the beginnings of such with a * behind}``. The plugin adds ``suite.json``, the
ids of all tests, and ``outcomes.jsonl``, one line ``[id, outcome, message]`` for each test that ran; the outcome is
passed, failed, skipped, xfailed or xpassed.
"""

import importlib.util
import json
import os
from pathlib import Path

import pytest

RUN = Path(os.environ["UPSTREAM_RUN"])
PLAN = json.loads((RUN / "plan.json").read_text())


def message_of(report: pytest.TestReport) -> str:
    """The last line that says why: the error, or the reason of a skip."""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    crash = getattr(report.longrepr, "reprcrash", None)
    return " ".join(str(crash.message if crash else report.longrepr).split())[:300]


class Outcomes:
    """Merges the reports of a test's setup, call and teardown into one outcome."""

    def __init__(self) -> None:
        self.file = open(RUN / "outcomes.jsonl", "w", buffering=1)  # noqa: SIM115 - open until the run ends
        self.found: dict[str, tuple[str, str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        outcome, message = self.found.get(report.nodeid, ("passed", ""))
        if hasattr(report, "wasxfail"):
            outcome = "xfailed" if report.skipped else "xpassed"
        elif report.failed or (report.skipped and outcome == "passed"):
            outcome, message = report.outcome, message_of(report)
        self.found[report.nodeid] = (outcome, message)
        if report.when == "teardown":
            self.file.write(json.dumps([report.nodeid, outcome, message]) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # with xdist, the process that the workers report to
        config.pluginmanager.register(Outcomes(), "upstream-outcomes")


def pytest_sessionstart(session: pytest.Session) -> None:
    """No run may judge another engine than the one it was asked to judge."""
    import vllm

    found, expected = Path(vllm.__file__).resolve().parent, Path(PLAN["engine"]).resolve()
    if found != expected:
        raise pytest.UsageError(f"vllm was imported from {found}, not from {expected}")
    patched = importlib.util.find_spec("vllm.v1.elastic_kv") is not None
    if patched != PLAN["patched"]:
        raise pytest.UsageError(
            f"the vllm in {found} is {'' if patched else 'not '}patched, against what was asked for"
        )


def wanted(test: str) -> bool:
    """Whether the plan wants ``test`` to run."""
    if PLAN["only"] is not None and test not in PLAN["only"]:
        return False
    return not any(test.startswith(name[:-1]) if name.endswith("*") else test == name for name in PLAN["skip"])


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if getattr(config, "workerinput", {"workerid": "gw0"})["workerid"] == "gw0":  # every worker collects the same
        (RUN / "suite.json").write_text(json.dumps([item.nodeid for item in items]))
    for item in items:
        # Upstream's own mark for tests that touch no device. The clean-up that it leaves out costs more than the tests.
        item.add_marker("skip_global_cleanup")
    config.hook.pytest_deselected(items=[item for item in items if not wanted(item.nodeid)])
    items[:] = [item for item in items if wanted(item.nodeid)]
