"""The arms of a comparison: long-lived processes of which only one works at a time."""

import contextlib
import itertools
import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from elastic_tools.pins import CACHE
from elastic_tools.setup.places import PYTHON, UPSTREAM, site_packages

LOGS = CACHE / "bench"
PROGRAM = Path(__file__).with_name("engine.py")


class BenchError(Exception):
    """A failure that the message explains."""


@dataclass(frozen=True)
class Arm:
    """What one process runs."""

    name: str
    patched: bool
    elastic: dict[str, Any] | None = None  # the elastic configuration; None is off

    @property
    def package(self) -> Path:
        """Where this arm's ``vllm`` lies."""
        return (site_packages() if self.patched else UPSTREAM) / "vllm"


class Process:
    """A running arm."""

    def __init__(self, arm: Arm, engine: dict[str, Any], environment: dict[str, str], program: Path = PROGRAM) -> None:
        self.arm = arm
        self.log = LOGS / f"{arm.name.replace(' ', '-')}.log"
        LOGS.mkdir(parents=True, exist_ok=True)
        child_commands, commands = os.pipe()
        answers, child_answers = os.pipe()
        settings = {"package": str(arm.package), "patched": arm.patched, "elastic": arm.elastic, "engine": engine}
        settings |= {"commands": child_commands, "answers": child_answers}
        own = ("VLLM_", "HF_", "PYTHON", "OMP_", "KMP_", "GOMP_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(own)}
        path = {} if arm.patched else {"PYTHONPATH": str(UPSTREAM)}
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [str(PYTHON), "-P", str(program), json.dumps(settings)],
                env=kept | path | environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(child_commands, child_answers),
                cwd=LOGS,
            )
        os.close(child_commands)
        os.close(child_answers)
        self._commands: IO[str] = os.fdopen(commands, "w", buffering=1)
        self._answers: IO[str] = os.fdopen(answers)
        self.identity: dict[str, Any] = {}

    def ready(self) -> None:
        """Waits until the engine is up."""
        self.identity = self._answer()

    def round(self, **command: Any) -> dict[str, Any]:
        """Runs one round and returns its measurements."""
        with contextlib.suppress(BrokenPipeError):  # the missing answer tells it
            print(json.dumps(command), file=self._commands)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        line = self._answers.readline()
        if not line:
            end = "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])
            raise BenchError(
                f"the arm '{self.arm.name}' ended with {self.process.wait()}; the end of {self.log}:\n{end}"
            )
        answer: dict[str, Any] = json.loads(line)
        return answer

    def stop(self) -> None:
        """Ends the process; by force where it does not end by itself."""
        with contextlib.suppress(BrokenPipeError):
            self._commands.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._answers.close()


@contextlib.contextmanager
def running(
    arms: Sequence[tuple[Arm, dict[str, Any]]], environment: dict[str, str], program: Path = PROGRAM
) -> Iterator[list[Process]]:
    """Starts the arms with their engine's arguments, one after the other; stops them when the block ends."""
    processes: list[Process] = []
    try:
        for arm, engine in arms:
            processes.append(Process(arm, engine, environment, program))
            processes[-1].ready()
        yield processes
    finally:
        for process in processes:
            process.stop()


def orders(arms: int, rounds: int) -> list[tuple[int, ...]]:
    """The order of the arms in each round.

    Each order is followed by its mirror image, and all orders take their turn, so that no arm is always the first, the
    last, or behind the same other one.
    """
    half = [order for order in itertools.permutations(range(arms)) if order[0] < order[-1] or arms == 1]
    pairs = itertools.cycle([one for order in half for one in (order, order[::-1])])
    return list(itertools.islice(pairs, rounds))
