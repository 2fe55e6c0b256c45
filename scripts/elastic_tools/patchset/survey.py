"""`survey`: how the series stands to another vLLM, hunk by hunk. The list to work from when moving to a new release."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from . import git
from .patchfile import Patch
from .series import Series, scratch_folder
from .target import Target

_HUNK = re.compile(rb"@@ -(\d+)(?:,\d+)? \+\d+(?:,\d+)? @@ ?(.*)")
_FILE = re.compile(rb"diff --git a/(\S+) b/")
_MOVED = re.compile(r"Hunk #1 succeeded at \d+ \(offset (-?\d+) lines?\)")
MOST_SHOWN = 4  # of what one hunk misses
FITS, MOVED, CHANGED, GONE = "fits", "moved", "does not fit", "file is gone"


@dataclass(frozen=True)
class Hunk:
    """One hunk of the series against the other vLLM."""

    patch: str
    path: str
    line: int  # of its first line, in the file as the pinned release and the patches before it have it
    where: str  # the function or class that the patch names, or nothing
    outcome: str
    offset: int = 0
    missing: tuple[str, ...] = ()  # what it expects and the file does not have


@dataclass(frozen=True)
class Name:
    """Something that a new module takes from vLLM, and that the other vLLM does not have there."""

    module: str  # the new module, as a path in the tree
    wanted: str  # what it imports, with dots


@dataclass(frozen=True)
class Survey:
    """All of it."""

    hunks: list[Hunk]
    names: list[Name]
    there: list[str]  # new files that the other vLLM has already


def survey(series: Series, target: Target) -> Survey:
    """Tries every hunk alone, after those before it that fit. The target is not written to."""
    files = series.files()
    own = {path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in files}
    hunks: list[Hunk] = []
    with scratch_folder() as scratch:
        for path in series.touched():
            if (target.site / path).is_file():
                (scratch / path).parent.mkdir(parents=True, exist_ok=True)
                (scratch / path).write_bytes((target.site / path).read_bytes())
        for patch in series.patches():
            hunks += [_try(patch.name, path, text, scratch) for path, text in split(patch)]
        added = _definitions_in(scratch, series)
    names = [
        Name(path, wanted)
        for path, file in files.items()
        for wanted in imports(file.read_text())
        if not _module_of(wanted, own) and wanted not in added and not _has(target.site, wanted)
    ]
    return Survey(hunks, names, [path for path in files if (target.site / path).exists()])


def split(patch: Patch) -> list[tuple[str, bytes]]:
    """The hunks of a patch, each as a diff of its own with its path."""
    found: list[tuple[str, bytes]] = []
    path, lines = "", patch.data.splitlines(keepends=True)
    for line in lines:
        if match := _FILE.match(line):
            path = match[1].decode()
        elif path and _HUNK.match(line):
            found.append((path, f"--- a/{path}\n+++ b/{path}\n".encode() + line))
        elif line == b"-- \n":
            path = ""
        elif found and path == found[-1][0] and not line.startswith((b"index ", b"--- ", b"+++ ")):
            found[-1] = (path, found[-1][1] + line)
    return found


def _try(patch: str, path: str, text: bytes, scratch: Path) -> Hunk:
    header = _HUNK.match(text.split(b"\n", 2)[2])
    assert header is not None
    line, where = int(header[1]), header[2].decode()
    if not (scratch / path).is_file():
        return Hunk(patch, path, line, where, GONE)
    result = git.run("apply", "--verbose", "--whitespace=nowarn", "--recount", "-", cwd=scratch, stdin=text)
    if result.returncode:
        return Hunk(patch, path, line, where, CHANGED, missing=_missing(text, (scratch / path).read_text()))
    moved = _MOVED.search(result.stderr.decode())
    return Hunk(patch, path, line, where, MOVED if moved else FITS, int(moved[1]) if moved else 0)


def _missing(text: bytes, source: str) -> tuple[str, ...]:
    """The lines that a hunk expects and that the file has nowhere; or those that other lines now keep apart."""
    expected = [one[1:] for one in text.decode().splitlines()[3:] if one[:1] in (" ", "-")]
    lines = source.splitlines()
    gone = tuple(f"`{_cell(one)}` is nowhere" for one in expected if one.strip() and one not in set(lines))
    neighbours = set(pairwise(lines))
    return gone or tuple(
        f"`{_cell(one)}` and `{_cell(other)}` are no neighbours"
        for one, other in pairwise(expected)
        if (one, other) not in neighbours
    )


def _cell(line: str) -> str:
    """A line of code as a table's cell can hold it."""
    return line.strip().replace("|", "\\|").replace("`", "'")


def imports(source: str) -> list[str]:
    """What a module takes from vLLM, with dots, sorted."""
    found = set()
    for node in ast.walk(_parsed(source)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "vllm":
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "vllm"}
    return sorted(found)


def _parsed(source: str) -> ast.Module:
    """The module; an empty one where this Python cannot read it, so that whatever is taken from it is listed."""
    try:
        return ast.parse(source)
    except SyntaxError:
        return ast.Module(body=[], type_ignores=[])


def _module_of(wanted: str, own: set[str]) -> bool:
    return wanted in own or wanted.rpartition(".")[0] in own


def _has(site: Path, wanted: str, through: frozenset[str] = frozenset()) -> bool:
    """Whether a module or a name in a module is there. ``through``: modules that take everything from this one."""
    place = site / wanted.replace(".", "/")
    if place.is_dir() or place.with_suffix(".py").is_file():
        return True
    module, _, name = wanted.rpartition(".")
    folder = site / module.replace(".", "/")
    file = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    if not file.is_file():
        return False
    source = file.read_text()
    package = module if folder.is_dir() else module.rpartition(".")[0]
    through |= {module}
    return name in _definitions(source) or any(
        _has(site, f"{star}.{name}", through) for star in _stars(source, package) if star not in through
    )


def _stars(source: str, package: str) -> Iterator[str]:
    """The modules of vLLM from which a module of ``package`` takes everything."""
    for node in ast.walk(_parsed(source)):
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            star = ".".join([*base, *filter(None, [node.module])])
            if star.startswith("vllm."):
                yield star


def _definitions(source: str) -> set[str]:
    """The names that a module has on its own level, in whatever way, and those that a lazy table of it mentions."""
    found: set[str] = set()
    for node in ast.walk(_parsed(source)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            found.add(node.value)  # __getattr__ of packages
    return found


def _definitions_in(scratch: Path, series: Series) -> set[str]:
    """What the series' own hunks brought into upstream's modules."""
    return {
        f"{path.removesuffix('.py').removesuffix('/__init__').replace('/', '.')}.{name}"
        for path in series.touched()
        if (scratch / path).is_file()
        for name in _definitions((scratch / path).read_text())
    }


def as_markdown(found: Survey, pinned: str, other: str) -> str:
    """The survey as a document. `pinned` and `other` are releases."""
    counts = {outcome: sum(hunk.outcome == outcome for hunk in found.hunks) for outcome in (FITS, MOVED, CHANGED, GONE)}
    lines = [
        f"# The series for {pinned} on vLLM {other}",
        "",
        "Written by `scripts/patchset survey`. Each hunk is tried alone, without fuzz, after those before it that fit.",
        "",
        f"{len(found.hunks)} hunks: " + ", ".join(f"{count} {outcome}" for outcome, count in counts.items()) + ".",
        "",
        "| patch | file | hunk | in | outcome | what it misses |",
        "|---|---|---|---|---|---|",
    ]
    for hunk in found.hunks:
        outcome = f"moved by {hunk.offset:+d}" if hunk.outcome == MOVED else hunk.outcome
        missing = "; ".join(hunk.missing[:MOST_SHOWN])
        more = f"; {len(hunk.missing) - MOST_SHOWN} more" if len(hunk.missing) > MOST_SHOWN else ""
        where = f"`{_cell(hunk.where)}`" if hunk.where.strip() else ""
        lines.append(f"| {hunk.patch[:4]} | `{hunk.path}` | {hunk.line} | {where} | {outcome} | {missing}{more} |")
    lines += ["", "## What the new modules take from vLLM", ""]
    lines += [f"- `{name.module}` takes `{name.wanted}`, which is not there." for name in found.names] or [
        "Every name that they import is there. Whether it still means the same, the tests tell."
    ]
    lines += [f"- `{path}` is there already." for path in found.there]
    return "\n".join(lines) + "\n"
