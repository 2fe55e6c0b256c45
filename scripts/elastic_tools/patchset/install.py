"""`apply`, `revert` and `status` on a target."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from . import stage
from .errors import Refusal
from .project import Project
from .series import digest
from .target import Target, find
from .txn import Entry, Plan, Store

APPLIED, NOT_APPLIED, HALF, MODIFIED, OTHER = "applied", "not applied", "half-applied", "modified", "another series"
EXIT_CODES = {APPLIED: 0, NOT_APPLIED: 3, HALF: 4, MODIFIED: 5, OTHER: 6}


@dataclass(frozen=True)
class Status:
    """How a target stands to the series of this checkout."""

    state: str
    target: Target
    series: str
    applied: str | None = None
    recorded: bool = False
    files: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, object]:
        """For scripts."""
        return {
            "state": self.state,
            "site": str(self.target.site),
            "kind": self.target.kind,
            "version": self.target.version,
            "series": self.series,
            "applied": self.applied,
            "recorded": self.recorded,
            "files": self.files,
        }


def status(project: Project, directory: Path) -> Status:
    """Looks and changes nothing."""
    target = find(directory)
    store, ours = Store(target.site), project.series.hash()
    under_way = Plan.load(store.journal)
    if under_way:
        return Status(HALF, target, ours, under_way.series, True)
    plan = Plan.load(store.record)
    if plan is None:
        return _without_record(project, target, ours)
    if edited := store.edited(plan):
        return Status(MODIFIED, target, ours, plan.series, True, edited)
    if missing := [entry.path for entry in plan.entries if store.now(entry.path) != entry.after]:
        return Status(HALF, target, ours, plan.series, True, missing)
    return Status(APPLIED if plan.series == ours else OTHER, target, ours, plan.series, True)


def _without_record(project: Project, target: Target, ours: str) -> Status:
    """Tells a tree that took the series through `git am` from one that has only parts of it."""
    store, series = Store(target.site), project.series
    files = series.files()
    there = [path for path in files if store.now(path) is not None]
    if files and not there:
        return Status(NOT_APPLIED, target, ours)
    try:
        stage.stage(series, target.site, reverse=True)
        reverses = bool(series.names())
    except stage.Misfit:
        reverses = False
    whole = all(store.now(path) == digest(file.read_bytes()) for path, file in files.items())
    if whole and (reverses or not series.names()) and (files or reverses):
        return Status(APPLIED, target, ours, ours, False)
    return Status(HALF if there else NOT_APPLIED, target, ours, None, False, there)


def apply(project: Project, directory: Path, force_version: bool = False) -> list[str]:
    """Applies the series; returns lines for the user. Raises :class:`Refusal` with the target untouched."""
    target = find(directory)
    store, lines = Store(target.site), [f"Found {target.describe()}."]
    if target.release != project.version and not force_version:
        has = f"is vLLM {target.version}" if target.version else "does not say which vLLM it is"
        raise Refusal(f"{target.site} {has}, and the series is for {project.version}: a fork takes --force-version.")
    with _plain_errors(target.site, store), store.lock():
        _require_writable(target.site, ["vllm"])
        if store.recover():
            lines.append("Undid an operation that was interrupted.")
        _refuse_unless_fresh(status(project, directory))
        staged = stage.stage(project.series, target.site)
        if staged.moved and not force_version:
            raise Refusal(f"{staged.moved[0]}: lines were added or removed above it; --force-version allows that.")
        plan, contents = _plan(project, target, staged.contents)
        _require_writable(target.site, [entry.path for entry in plan.entries])
        executable = {path for path, file in project.series.files().items() if os.access(file, os.X_OK)}
        store.install(plan, contents, executable)
    lines += [f"Moved: {line}." for line in staged.moved]
    new = sum(entry.before is None for entry in plan.entries)
    lines.append(f"Applied series {plan.series[:12]}: {len(plan.entries) - new} files patched, {new} new.")
    return lines


def revert(project: Project, directory: Path) -> list[str]:
    """Takes the series out again; returns lines for the user. Raises :class:`Refusal` with the target untouched."""
    target = find(directory)
    store, lines = Store(target.site), [f"Found {target.describe()}."]
    with _plain_errors(target.site, store), store.lock():
        _require_writable(target.site, ["vllm"])
        plan = Plan.load(store.journal) or Plan.load(store.record)
        if plan is None:
            now = status(project, directory)
            if now.state == NOT_APPLIED:
                store.recover()
                raise Refusal(f"{target.site} does not have the series: there is nothing to revert.")
            raise Refusal(
                f"{target.site} has the series, or a part, without a record, as from git am: use git to revert."
            )
        if plan.version != target.version and not any(store.now(e.path) == e.after for e in plan.entries if e.before):
            lines.append(f"vLLM {plan.version} was replaced since: its files stay as they are.")
            plan = replace(plan, entries=[entry for entry in plan.entries if entry.before is None])
        _require_writable(target.site, [entry.path for entry in plan.entries])
        store.restore(plan)
    new = sum(entry.before is None for entry in plan.entries)
    lines.append(f"Reverted series {plan.series[:12]}: {len(plan.entries) - new} files as before, {new} removed.")
    left = [folder for folder in plan.folders if (target.site / folder).exists()]
    lines += [f"Left {folder}: it holds files that the series did not bring." for folder in left]
    return lines


def _refuse_unless_fresh(now: Status) -> None:
    site = now.target.site
    if now.state == APPLIED:
        raise Refusal(f"The series {now.series[:12]} is already applied to {site}.")
    if now.state == OTHER:
        raise Refusal(f"{site} has another version of the series, {(now.applied or '')[:12]}: revert it first.")
    if now.state == MODIFIED:
        raise Refusal(Store(site).edit_in_the_way(now.files))
    if now.state == HALF and now.recorded:
        raise Refusal(f"{site} is half-applied: {now.files[0]} is as before, others are patched; revert it first.")
    if now.state == HALF:
        raise Refusal(f"{site} has {now.files[0]} already, without a record: remove it, or reinstall vLLM.")


def _plan(project: Project, target: Target, patched: dict[str, bytes]) -> tuple[Plan, dict[str, bytes]]:
    store, series = Store(target.site), project.series
    contents = patched | {path: file.read_bytes() for path, file in series.files().items()}
    entries, folders = [], dict[str, None]()
    for path, data in contents.items():
        if not path.startswith("vllm/"):
            raise Refusal(f"{path} is outside vllm/: the series may only change what is installed.")
        before = store.now(path)
        if (target.site / path).is_symlink() and before is None:
            raise Refusal(f"{path} is a link that leads nowhere.")
        for folder in reversed(Path(path).parents):
            place = target.site / folder
            if not place.exists():
                folders[folder.as_posix()] = None
            elif not place.resolve().is_relative_to((target.site / "vllm").resolve()) and folder.parts:
                raise Refusal(f"{folder} leads out of {target.site}/vllm: applying would change another tree.")
        if before != digest(data):
            entries.append(Entry(path, before, digest(data)))
    plan = Plan(series.hash(), target.version, series.names(), entries, list(folders))
    return plan, contents


def _require_writable(site: Path, paths: list[str]) -> None:
    for path in paths:
        folder = site / path if path == "vllm" else (site / path).parent
        while not folder.exists():
            folder = folder.parent
        if not os.access(folder, os.W_OK | os.X_OK):
            raise Refusal(f"{folder} cannot be written by this user: nothing was changed.")


@contextlib.contextmanager
def _plain_errors(site: Path, store: Store) -> Iterator[None]:
    """Turns a failing system call into a sentence."""
    try:
        yield
    except OSError as fault:
        state = "it was interrupted half-way, and revert undoes it" if store.journal.exists() else "nothing was changed"
        raise Refusal(f"{fault.filename or site}: {fault.strerror or fault}; {state}.") from fault
