"""Puts a set of files in place all or nothing, and takes them back, over interruptions at any point.

State lies in ``vllm/.elastic-kv`` of the target: ``before/`` holds the files as they were, ``next/`` files about to
move in, ``journal.json`` exists while an operation is under way, ``record.json`` while the series is applied.

Going back is the only recovery, and may be repeated: every file is either as before or as after, `before/` is complete
before the journal appears, and goes only after journal and record. Files are never written in place, because they may
share their inode with another environment: each arrives by a rename.
"""

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .errors import Refusal
from .series import atomic_write, digest

STATE = "vllm/.elastic-kv"


@dataclass(frozen=True)
class Entry:
    """One file: sha256 before (``None``: it did not exist) and after."""

    path: str
    before: str | None
    after: str


@dataclass(frozen=True)
class Plan:
    """What an application did or is about to do; kept as JSON in journal and record."""

    series: str
    version: str | None
    patches: list[str]
    entries: list[Entry]
    folders: list[str]  # made for new files, outermost first

    @classmethod
    def load(cls, file: Path) -> "Plan | None":
        """The plan in ``file``, ``None`` where there is none."""
        try:
            raw: dict[str, Any] = json.loads(file.read_text())
            return cls(**(raw | {"entries": [Entry(**entry) for entry in raw["entries"]]}))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError):
            raise Refusal(f"{file} cannot be read: reinstall vLLM to get a clean state.") from None

    def dump(self, file: Path) -> None:
        """Writes the plan to ``file`` in one step."""
        atomic_write(file, (json.dumps(asdict(self), indent=1) + "\n").encode())


def move(source: Path, place: Path) -> None:
    """Renames ``source`` over ``place``. Tests replace this to fail at a chosen moment."""
    os.replace(source, place)


def remove(place: Path) -> None:
    """Removes a file. Tests replace this to fail at a chosen moment."""
    place.unlink()


class Store:
    """The state folder of one target, whose files lie under ``site``."""

    def __init__(self, site: Path) -> None:
        self.site = site
        self.state = site / STATE
        self.journal = self.state / "journal.json"
        self.record = self.state / "record.json"

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Holds off a second process; the lock goes with the process, however it ends."""
        handle = os.open(self.site / "vllm", os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError:
            raise Refusal(f"Another patchset is at work on {self.site}.") from None
        finally:
            os.close(handle)

    def now(self, path: str) -> str | None:
        """The sha256 of a file as it is, ``None`` where it is not there."""
        try:
            return digest((self.site / path).read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            return None

    def clear(self) -> None:
        """Removes the state folder. Journal and record go first: what remains after that means nothing."""
        self.record.unlink(missing_ok=True)
        self.journal.unlink(missing_ok=True)
        if self.state.exists():
            shutil.rmtree(self.state)

    def install(self, plan: Plan, contents: dict[str, bytes], executable: set[str]) -> None:
        """Brings in ``contents``; on any failure the target is as before, or a journal says how to get there."""
        try:
            self._prepare(plan, contents, executable)
            plan.dump(self.journal)
            for folder in plan.folders:
                (self.site / folder).mkdir(exist_ok=True)
                self._own(self.site / folder)
            for entry in plan.entries:
                move(self.state / "next" / entry.path, self.site / entry.path)
            plan.dump(self.record)
            self.journal.unlink()
        except BaseException:
            self.recover()
            raise
        shutil.rmtree(self.state / "next", ignore_errors=True)

    def _prepare(self, plan: Plan, contents: dict[str, bytes], executable: set[str]) -> None:
        self.clear()
        self.state.mkdir()
        (self.state / ".gitignore").write_text("*\n")
        for entry in plan.entries:
            place, fresh = self.site / entry.path, self.state / "next" / entry.path
            fresh.parent.mkdir(parents=True, exist_ok=True)
            with open(fresh, "wb") as file:
                file.write(contents[entry.path])
                file.flush()
                os.fsync(file.fileno())
            if entry.before is None:
                fresh.chmod(0o755 if entry.path in executable else 0o644)
                self._own(fresh)
                continue
            like = place.stat()
            fresh.chmod(like.st_mode & 0o7777)
            with contextlib.suppress(PermissionError):
                os.chown(fresh, like.st_uid, like.st_gid)
            kept = self.state / "before" / entry.path
            kept.parent.mkdir(parents=True, exist_ok=True)
            _copy(place, kept)

    def _own(self, place: Path) -> None:
        """Gives what root makes to the owner of the target."""
        like = (self.site / "vllm").stat()
        with contextlib.suppress(PermissionError):
            os.chown(place, like.st_uid, like.st_gid)

    def recover(self) -> Plan | None:
        """Ends an operation that was interrupted; returns its plan, or ``None`` where there was none."""
        plan = Plan.load(self.journal)
        if plan is None:
            if self.state.exists() and not self.record.exists():
                self.clear()
            return None
        self.restore(plan)
        return plan

    def edited(self, plan: Plan) -> list[str]:
        """Files that are neither as before nor as after."""
        return [entry.path for entry in plan.entries if self.now(entry.path) not in (entry.before, entry.after)]

    def edit_in_the_way(self, edited: list[str]) -> str:
        """What to tell a user whose edits of files of the series nothing may overwrite."""
        path, others = edited[0], f" ({len(edited) - 1} more)" if len(edited) > 1 else ""
        kept = self.state / "before" / path
        way = f"copy {kept} over it" if kept.exists() else "remove it"
        return f"{path}{others} was edited since the series was applied: save it elsewhere, {way}, then revert."

    def restore(self, plan: Plan) -> None:
        """Puts everything back as it was before ``plan``, from whatever point between before and after."""
        if edited := self.edited(plan):
            raise Refusal(self.edit_in_the_way(edited))
        back = [entry for entry in plan.entries if self.now(entry.path) != entry.before]
        for entry in back:
            kept = self.state / "before" / entry.path
            if entry.before is not None and not kept.is_symlink() and _digest_or_none(kept) != entry.before:
                raise Refusal(f"{kept} is damaged, so {entry.path} cannot be put back: reinstall vLLM.")
        plan.dump(self.journal)
        for entry in reversed(back):
            place, fresh = self.site / entry.path, self.state / "next" / entry.path
            if entry.before is None:
                remove(place)
                continue
            fresh.parent.mkdir(parents=True, exist_ok=True)
            fresh.unlink(missing_ok=True)
            _copy(self.state / "before" / entry.path, fresh)
            move(fresh, place)
        self._sweep(plan)
        self.clear()

    def _sweep(self, plan: Plan) -> None:
        """Removes what Python compiled from new files, and the folders made for them, if nothing else is there."""
        for entry in plan.entries:
            if entry.before is None:
                place = self.site / entry.path
                for compiled in place.parent.glob(f"__pycache__/{place.stem}.*.pyc"):
                    compiled.unlink()
        for folder in reversed(plan.folders):
            for place in (self.site / folder / "__pycache__", self.site / folder):
                with contextlib.suppress(OSError):
                    place.rmdir()


def _copy(source: Path, place: Path) -> None:
    """A copy with mode, times and owner; a link stays a link."""
    shutil.copy2(source, place, follow_symlinks=False)
    like = source.lstat()
    with contextlib.suppress(PermissionError):
        os.chown(place, like.st_uid, like.st_gid, follow_symlinks=False)


def _digest_or_none(file: Path) -> str | None:
    try:
        return digest(file.read_bytes())
    except OSError:
        return None
