"""One run of upstream's suite on one of the two engines."""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from elastic_tools.patchset.fetch import ensure_source
from elastic_tools.patchset.project import Project
from elastic_tools.pins import CACHE, ROOT
from elastic_tools.setup.packages import pip
from elastic_tools.setup.places import LOCKS, PYTHON, UPSTREAM, site_packages
from elastic_tools.upstream_tests.lists import DATA, SUITE

WORK = CACHE / "upstream-tests"
TORCHVISION = WORK / "torchvision"
LIMIT_S = 30 * 60
WORKERS = 2


class Failure(Exception):
    """What is wrong, in words for the reader of a test log."""


@dataclass(frozen=True)
class Outcome:
    """How one test ended: passed, failed, skipped, xfailed, xpassed or missing, and why where it did not pass."""

    outcome: str
    message: str = ""


@dataclass(frozen=True)
class Run:
    """What a run brought to light."""

    suite: list[str]  # every test that pytest found, in order, whether it ran or not
    outcomes: dict[str, Outcome]
    log: Path
    problem: str = ""  # why the run as a whole counts for nothing; empty where it does count

    @property
    def passed(self) -> set[str]:
        """The tests that passed."""
        return {test for test, outcome in self.outcomes.items() if outcome.outcome == "passed"}

    def outcome(self, test: str) -> Outcome:
        """How ``test`` ended."""
        return self.outcomes.get(test, Outcome("missing", "it did not run to its end"))


def run_suite(
    name: str, patched: bool, title: str, only: Collection[str] | None = None, skip: Collection[str] = ()
) -> Run:
    """Runs the tests ``only`` (None: all) but not those that match ``skip``. Leaves its files in ``WORK/name``."""
    run = lay_out(name)
    engine = (site_packages() if patched else UPSTREAM) / "vllm"
    plan = {"engine": str(engine), "patched": patched, "only": None if only is None else sorted(only)}
    (run / "plan.json").write_text(json.dumps(plan | {"skip": list(skip)}))
    command = [str(PYTHON), "-m", "pytest", SUITE, "-q", "--tb=short", "-p", "elastic_upstream_plugin"]
    command += ["-p", "no:cacheprovider", "-p", "no:timeout", "-n", str(WORKERS), "--dist", "loadfile"]
    log, problem = run / "pytest.log", ""
    with open(log, "w") as output:
        process = subprocess.Popen(
            command, cwd=run, env=environment(run, patched), stdout=output, stderr=output, start_new_session=True
        )
        try:
            follow(process, run / "outcomes.jsonl", title, total=None if only is None else len(only))
        except TimeoutError:
            problem = f"it was given up after {LIMIT_S} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    found = run / "suite.json"
    if not problem and (process.returncode not in (0, 1) or not found.exists()):  # 1: some tests failed
        problem = f"pytest ended with {process.returncode}"
    if problem:
        problem += f"; the end of {log}:\n" + "\n".join(log.read_text(errors="replace").splitlines()[-20:])
    suite = json.loads(found.read_text()) if found.exists() else []
    return Run(suite, read_outcomes(run / "outcomes.jsonl"), log, problem)


def lay_out(name: str) -> Path:
    """A fresh directory with upstream's tests and the model configurations, and without upstream's ``vllm`` package."""
    source = ensure_source(Project.at(ROOT))
    run = WORK / name
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(source / "tests", run / "tests")
    shutil.copy(source / "pyproject.toml", run)  # holds pytest's settings
    shutil.copytree(DATA / "models", run, dirs_exist_ok=True)
    return run


def environment(run: Path, patched: bool) -> dict[str, str]:
    """The child's environment: none of the caller's own settings of vLLM and Python, no network, a fixed seed."""
    own = ("VLLM_", "HF_", "PYTEST_", "PYTHON")
    path = [*([] if patched else [UPSTREAM]), DATA / "site", torchvision()]
    return {name: value for name, value in os.environ.items() if not name.startswith(own)} | {
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "PYTHONHASHSEED": "0",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(run / "hub"),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(run / "cache"),
        "OMP_NUM_THREADS": "1",  # the workers share the cores
        "UPSTREAM_RUN": str(run),
    }


def torchvision() -> Path:
    """A directory with the torchvision of the engine's torch, for these tests alone; fetched where it is missing.

    The multimodal tests import it. The CPU engine goes without (``tests/upstream/site`` says why), so the version and
    the hashes are those in the CUDA engine's lock.
    """
    entry = re.search(r"^torchvision==(?:.*\\\n)*.*\n", (LOCKS / "cuda.txt").read_text(), re.MULTILINE)
    if entry is None:
        raise Failure("configs/locks/cuda.txt names no torchvision")
    stamp = TORCHVISION / "requirement.txt"
    if not stamp.exists() or stamp.read_text() != entry[0]:
        shutil.rmtree(TORCHVISION, ignore_errors=True)
        temporary = WORK / f".torchvision-{os.getpid()}"
        temporary.mkdir(parents=True)
        requirement = temporary / "requirement.txt"
        requirement.write_text(entry[0])
        options = ["--no-deps", "--require-hashes", "--only-binary", ":all:", "--target", str(temporary)]
        pip("install", *options, "-r", str(requirement))
        temporary.rename(TORCHVISION)
    return TORCHVISION


def follow(process: subprocess.Popen[bytes], outcomes: Path, title: str, total: int | None) -> None:
    """Waits for pytest and shows how many tests are done. Raises ``TimeoutError`` after ``LIMIT_S`` seconds."""
    end = time.monotonic() + LIMIT_S
    with tqdm(total=total, desc=title, unit="test", disable=None) as bar:
        while process.poll() is None:
            if time.monotonic() > end:
                raise TimeoutError
            time.sleep(0.5)
            bar.update(len(read_outcomes(outcomes)) - bar.n)


def read_outcomes(path: Path) -> dict[str, Outcome]:
    """What the plugin wrote; whole lines only, since it may still be at work."""
    text = path.read_text() if path.exists() else ""
    lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    return {test: Outcome(outcome, message) for test, outcome, message in lines}
