"""The two files that say what becomes of each of upstream's tests."""

import tomllib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from elastic_tools.pins import ROOT, pins

SUITE = "tests/v1/core"
DATA = ROOT / "tests" / "upstream"
LIST = DATA / "v1_core.txt"
NOT_RUN = DATA / "not_run.toml"


@dataclass(frozen=True)
class Group:
    """Tests that are left out, for one reason. A name that ends in ``*`` stands for all that begin so."""

    name: str
    reason: str
    tests: list[str]

    def holds(self, test: str) -> bool:
        """Whether ``test`` is left out by this group."""
        return any(matches(one, test) for one in self.tests)


def matches(name: str, test: str) -> bool:
    """Whether ``name``, as ``not_run.toml`` writes it, stands for ``test``."""
    return test.startswith(name[:-1]) if name.endswith("*") else test == name


def read_groups(path: Path = NOT_RUN) -> list[Group]:
    """The tests that are left out."""
    return [Group(**group) for group in tomllib.loads(path.read_text())["group"]]


def read_list(path: Path = LIST) -> list[str]:
    """The tests that must pass. Raises ``ValueError`` where the list is of another release than the pinned one."""
    head, *lines = path.read_text().splitlines()
    if f"vLLM {pins()['vllm']['version']}," not in head:
        raise ValueError(f"{path.name} is not of the pinned vLLM; run `scripts/upstream-tests baseline`")
    return [line for line in lines if line and not line.startswith("#")]


def write_list(tests: Sequence[str], path: Path = LIST) -> None:
    """Replaces the list."""
    head = f"# vLLM {pins()['vllm']['version']}, {SUITE}: the tests that pass on the unpatched engine on a CPU.\n"
    head += "# Written by `scripts/upstream-tests baseline`.\n"
    path.write_text(head + "".join(f"{test}\n" for test in tests))


def misplaced(suite: Collection[str], listed: Collection[str], groups: Sequence[Group]) -> list[str]:
    """What does not fit between the suite and the two files, a sentence each."""
    known, in_list = set(suite), set(listed)
    wrong = []
    for test in suite:
        places = [group.name for group in groups if group.holds(test)] + ["the list"] * (test in in_list)
        if len(places) != 1:
            wrong.append(f"{test} is in {' and in '.join(places) or 'neither file'}")
    wrong += [f"{test} is listed, but the suite has no such test" for test in listed if test not in known]
    for group in groups:
        for name in group.tests:
            if not any(matches(name, test) for test in suite):
                wrong.append(f"{name} is in {group.name}, but the suite has no such test")
    return wrong
