"""Works out what the series makes of a set of files, in a scratch repository, without touching the files."""

import re
from dataclasses import dataclass, field
from pathlib import Path

from . import git
from .errors import Refusal
from .series import Series, scratch_folder

_CHECKING = re.compile(r"Checking patch (\S+?)\.\.\.$")
_MOVED = re.compile(r"Hunk #(\d+) succeeded at (\d+) \((.*offset (-?\d+) lines?.*)\)")
_FAILED = re.compile(r"error: patch failed: (\S+):(\d+)$")


class Misfit(Refusal):
    """A hunk does not fit."""


@dataclass
class Staged:
    """The outcome: new content by path, and a line for each hunk that was found elsewhere than the patch says."""

    contents: dict[str, bytes] = field(default_factory=dict)
    moved: list[str] = field(default_factory=list)


def stage(series: Series, source: Path, reverse: bool = False) -> Staged:
    """Applies the series to copies of the files under ``source``; raises :class:`Misfit` where a hunk does not fit."""
    staged = Staged()
    patches = series.patches()
    with scratch_folder() as scratch:
        # A repository of its own: inside another one `git apply` would skip paths without a word.
        git.init(scratch)
        for path in series.touched():
            original, copy = source / path, scratch / path
            if not original.is_file():
                raise Misfit(f"{path} is missing, which the series changes.")
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(original.read_bytes())
        for patch in reversed(patches) if reverse else patches:
            way = ("--reverse",) if reverse else ()
            result = git.run("apply", "--verbose", "--whitespace=nowarn", *way, "-", cwd=scratch, stdin=patch.data)
            report = result.stderr.decode("utf-8", "replace").splitlines()
            if result.returncode:
                raise Misfit(_why(patch.name, report, scratch))
            staged.moved += _moved(patch.name, report)
        for path in series.touched():
            copy = scratch / path
            if not copy.is_file():
                raise Misfit(f"{path} would be removed by the series; patches may only edit files.")
            staged.contents[path] = copy.read_bytes()
    return staged


def _why(patch: str, report: list[str], scratch: Path) -> str:
    for line in report:
        if match := _FAILED.match(line):
            where = f"{match[1]}, hunk at line {match[2]}, does not fit"
            lines = (scratch / match[1]).read_bytes().splitlines(keepends=True)
            if lines and all(one.endswith(b"\r\n") for one in lines):
                return f"{where}: the file has CRLF line ends, and upstream's are LF; convert it first."
            return f"{where}: the file differs there from what {patch} expects; docs/rebasing.md says what to do."
    errors = [line.removeprefix("error: ") for line in report if line.startswith("error: ")]
    return f"{patch} does not apply: {(errors or ['git gives no reason'])[0]}."


def _moved(patch: str, report: list[str]) -> list[str]:
    found, path = [], ""
    for line in report:
        if match := _CHECKING.match(line):
            path = match[1]
        elif match := _MOVED.match(line):
            found.append(f"{path}, hunk {match[1]} of {patch}, found at line {match[2]} ({match[3]})")
    return found
