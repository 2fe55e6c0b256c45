"""`check`: whether the series is sound, one line per check."""

from collections.abc import Callable
from pathlib import Path

from . import fetch, git, patchfile, stage, tree
from .errors import Refusal
from .project import Project
from .series import PATCH_NAME, Series, scratch_folder


def listed(project: Project) -> list[str]:
    """The series file names every patch once and only patches that are there."""
    names, present = project.series.names(), project.series.present()
    problems = [f"{name} is listed {names.count(name)} times" for name in sorted(set(names)) if names.count(name) > 1]
    problems += [f"{name} is listed, but is not in patches/" for name in names if name not in present]
    return problems + [f"{name} is in patches/, but is not listed" for name in present if name not in names]


def numbered(project: Project) -> list[str]:
    """Numbers run from 0001 without gaps, in the order of the series."""
    problems = []
    for number, name in enumerate(project.series.names(), 1):
        match = PATCH_NAME.match(name)
        if not match:
            problems.append(f"{name} is not named NNNN-topic.patch")
        elif int(match[1]) != number:
            problems.append(f"{name} stands where {number:04d} is due")
    return problems


def parses(project: Project) -> list[str]:
    """Every patch can be read."""
    problems = []
    for name in project.series.present():
        try:
            patchfile.read(project.series.path / name)
        except patchfile.Malformed as fault:
            problems.append(f"{name} {fault}")
    return problems


def headed(project: Project) -> list[str]:
    """Every header is complete."""
    return [f"{patch.name} {problem}" for patch in project.series.patches() for problem in patch.header_problems()]


def edits_only(project: Project) -> list[str]:
    """Patches edit files of upstream under vllm/ and do nothing else to them."""
    source, problems = fetch.ensure_source(project), []
    for patch in project.series.patches():
        for change in patch.changes:
            if not change.path.startswith("vllm/"):
                problems.append(f"{patch.name} touches {change.path}, which is not part of an installed vLLM")
            elif change.kind == "add":
                problems.append(f"{patch.name} adds {change.path}: new files belong in patches/files")
            elif change.kind != "edit":
                problems.append(f"{patch.name} does not just edit {change.path} ({change.kind})")
            elif not (source / change.path).is_file():
                problems.append(f"{patch.name} touches {change.path}, which upstream does not have")
    return problems


def new_files(project: Project) -> list[str]:
    """New files are under vllm/ and do not exist upstream."""
    source, problems = fetch.ensure_source(project), []
    for path in project.series.files():
        if not path.startswith("vllm/"):
            problems.append(f"patches/files/{path} is outside vllm/")
        if (source / path).exists():
            problems.append(f"patches/files/{path} exists upstream: change it with a patch")
    return problems


def applies(project: Project) -> list[str]:
    """The series applies in order without fuzz and without offset."""
    try:
        return stage.stage(project.series, fetch.ensure_source(project)).moved
    except stage.Misfit as fault:
        return [str(fault).rstrip(".")]


def stable(project: Project) -> list[str]:
    """A tree made anew exports the very bytes that are in patches/."""
    with scratch_folder() as scratch:
        small_tree(project.series, fetch.ensure_source(project), scratch)
        fresh = tree.exported(scratch)
    problems = []
    for name, (other, data) in zip(project.series.names(), fresh.items(), strict=True):
        if name != other:
            problems.append(f"{name} would be exported as {other}")
        elif (project.series.path / name).read_bytes() != data:
            problems.append(f"{name} would be exported with other bytes: run tree, then refresh")
    return problems


def small_tree(series: Series, source: Path, into: Path) -> None:
    """A repository as `tree` makes it, with only the files that the series touches: the patches are the same."""
    git.init(into)
    for path in series.touched():
        if not (source / path).is_file():
            raise Refusal(f"{path} is missing, which the series changes.")
        place = into / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes((source / path).read_bytes())
        place.chmod((source / path).stat().st_mode & 0o777)
    git.commit_all(into, "base")
    git.output("tag", tree.BASE, cwd=into)
    tree.apply_mail(into, series)


CHECKS: list[tuple[str, Callable[[Project], list[str]]]] = [
    ("every patch parses", parses),
    ("the series lists each patch once", listed),
    ("numbers are contiguous", numbered),
    ("headers are complete", headed),
    ("patches only edit upstream's files", edits_only),
    ("new files are new", new_files),
    ("each patch applies without fuzz or offset", applies),
    ("a re-export gives the same bytes", stable),
]


def main(project: Project) -> int:
    """Runs every check, prints a line for each, a summary, and returns the exit code."""
    failed = 0
    for title, test in CHECKS:
        try:
            problems = test(project)
        except Refusal as refusal:
            problems = [str(refusal).rstrip(".")]
        except OSError as fault:
            problems = [f"{fault.filename}: {fault.strerror}"]
        print(f"{'FAIL' if problems else 'ok  '}  {title}")
        for problem in problems:
            print(f"      {problem}")
        failed += bool(problems)
    series = project.series
    try:
        identity = series.hash()[:12]
    except OSError:
        identity = "incomplete"
    verdict = f"{failed} of {len(CHECKS)} checks failed" if failed else f"all {len(CHECKS)} checks passed"
    print(f"{verdict}: {len(series.names())} patches, {len(series.files())} new files, series {identity}")
    return 1 if failed else 0
