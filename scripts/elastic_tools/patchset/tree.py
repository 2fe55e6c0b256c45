"""The editable upstream checkout: one commit of upstream, then one commit per patch."""

import os
import re
import shutil
import tempfile
from pathlib import Path

from . import fetch, git, patchfile
from .errors import Refusal
from .project import Project
from .series import Series, atomic_write

BASE = "upstream"
_SYNCED = "refs/patchset/synced"  # HEAD when tree and patches/ last agreed
_FORMAT = [
    "format-patch",
    "--stdout",
    "--zero-commit",
    "--full-index",
    "--no-signature",
    "--no-stat",
    "--no-numbered",
    "--no-renames",
    "--no-thread",
    "--no-attach",
    "--no-add-header",
    "--no-cover-letter",
    "--no-base",
    "--no-notes",
    "--no-ext-diff",
    "--no-textconv",
    "--no-color",
    "--unified=3",
    "--src-prefix=a/",
    "--dst-prefix=b/",
    "--subject-prefix=PATCH",
]


def make(project: Project, force: bool = False) -> str:
    """Makes or brings up to date the tree; returns a sentence. With ``force`` work that is not exported is lost."""
    tree = project.tree
    if tree.exists() and not force:
        _require_clean(tree)
        head = _commit(tree, "HEAD")
        if head != _commit(tree, _SYNCED) and exported(tree) != _on_disk(project.series):
            raise Refusal(
                f'{tree} holds commits that are not in patches/: run "refresh", or "tree --force" to drop them.'
            )
    if not (tree / ".git").is_dir() or not _is_base_of(tree, project):
        _fresh(project)
    else:
        git.run("am", "--abort", cwd=tree)
        git.output("reset", "--quiet", "--hard", BASE, cwd=tree)
    link_files(project)
    try:
        apply_mail(tree, project.series)
    except Refusal as fault:
        how = f'mend it in {tree}, go on with "git am --continue", then run "refresh"'
        raise Refusal(f"{str(fault).rstrip('.')}: {how}.") from None
    git.output("update-ref", _SYNCED, "HEAD", cwd=tree)
    count = len(project.series.names())
    return f"{tree} holds vLLM {project.version}, {count} patch{'' if count == 1 else 'es'} and links to the new files."


def _fresh(project: Project) -> None:
    sdist = fetch.ensure_sdist(project)
    with tempfile.TemporaryDirectory(dir=project.cache, prefix=".tree-") as temporary:
        top = fetch.unpack(sdist, Path(temporary))
        git.init(top)
        for key, value in {
            "user.name": git.AUTHOR,
            "user.email": git.EMAIL,
            "commit.gpgSign": "false",
            "core.autocrlf": "false",
            "core.safecrlf": "false",
            "gc.auto": "0",
        }.items():
            git.output("config", key, value, cwd=top)
        git.commit_all(top, _base_message(project))
        git.output("tag", BASE, cwd=top)
        if project.tree.exists():
            shutil.rmtree(project.tree)
        shutil.move(top, project.tree)


def _base_message(project: Project) -> str:
    return f"vLLM {project.version}, source release\n\nsha256 {project.sha256}\n"


def _is_base_of(tree: Path, project: Project) -> bool:
    result = git.run("log", "-1", "--format=%B", BASE, cwd=tree)
    return result.returncode == 0 and result.stdout.decode().strip() == _base_message(project).strip()


def _commit(tree: Path, name: str) -> str:
    return git.run("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}", cwd=tree).stdout.decode().strip()


def apply_mail(tree: Path, series: Series) -> None:
    """Commits the series on top of ``tree``, one commit per patch; `git am` waits at one that does not fit."""
    names = series.names()
    if not names:
        return
    files = [str((series.path / name).resolve()) for name in names]
    result = git.run(
        *("am", "--quiet", "--keep-cr", "--keep-non-patch", "--no-gpg-sign", "--committer-date-is-author-date"),
        *("--whitespace=nowarn", "--no-3way", *files),
        cwd=tree,
    )
    if result.returncode:
        at = tree / ".git" / "rebase-apply" / "next"
        number = int(at.read_text()) if at.is_file() else 1
        fault = re.search(r"error: patch failed: (\S+):(\d+)", result.stderr.decode("utf-8", "replace"))
        where = f" at {fault[1]}, hunk at line {fault[2]}" if fault else ""
        raise Refusal(f"{names[number - 1]} does not fit{where}.")


def link_files(project: Project) -> None:
    """Links every new file into the tree and hides the links from its commits; removes links that lead nowhere."""
    tree, base = project.tree, (project.series.path / "files").resolve()
    exclude = tree / ".git" / "info" / "exclude"
    for line in exclude.read_text().splitlines() if exclude.is_file() else []:
        old = tree / line.lstrip("/")
        if old.is_symlink():
            old.unlink()
    links: dict[str, Path] = {}
    for path in project.series.files():
        parts = Path(path).parts
        # Link the topmost folder that upstream does not have: new modules then appear in the tree by themselves.
        depth = next((n for n in range(1, len(parts)) if not _real_folder(tree.joinpath(*parts[:n]))), len(parts))
        place = Path(*parts[:depth])
        links[place.as_posix()] = base / place
    for place_name, source in links.items():
        link = tree / place_name
        if link.exists() and not link.is_symlink():
            raise Refusal(f"{place_name} is in patches/files, but upstream has a file of that name.")
        link.unlink(missing_ok=True)
        link.symlink_to(os.path.relpath(source, link.parent.resolve()))
    atomic_write(exclude, "".join(f"/{name}\n" for name in links).encode())


def _real_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _require_clean(tree: Path) -> None:
    if not (tree / ".git").is_dir():
        raise Refusal(
            f'{tree} is not a checkout that this tool made: move it away, or run "tree --force" to replace it.'
        )
    for state, command in (("rebase-apply", "am"), ("rebase-merge", "rebase"), ("MERGE_HEAD", "merge")):
        if (tree / ".git" / state).exists():
            raise Refusal(
                f'{tree} is in the middle of "git {command}": finish it with "git {command} --continue" first.'
            )
    status = git.output("status", "--porcelain", "--untracked-files=all", cwd=tree).decode()
    if status:
        names = [line[3:] for line in status.splitlines()]
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise Refusal(f"{tree} has changes that are not committed: {names[0]}{more}.")


def exported(tree: Path, base: str = BASE) -> dict[str, bytes]:
    """File name to content of every commit after ``base``, as the series would hold them."""
    listing = git.output("rev-list", "--reverse", "--topo-order", "--parents", f"{base}..HEAD", cwd=tree).decode()
    found: dict[str, bytes] = {}
    for number, line in enumerate(listing.splitlines(), 1):
        commit, *parents = line.split()
        if len(parents) != 1:
            raise Refusal(f"{tree} has a merge commit, {commit[:12]}: the series is a straight line of patches.")
        data = git.output(*_FORMAT, "-1", commit, cwd=tree)
        try:
            subject = patchfile.parse("", data).subject
        except patchfile.Malformed as fault:
            raise Refusal(f"Commit {commit[:12]} cannot be a patch: it {fault}.") from None
        found[f"{number:04d}-{_topic(subject)}.patch"] = data
    return found


def _topic(subject: str) -> str:
    """A short file name from a subject line: words in lower case, cut between words."""
    topic = re.sub(r"[^a-z0-9]+", "-", subject.lower()).strip("-")
    return topic if len(topic) <= 48 else topic[:49].rpartition("-")[0] or topic[:48]


def _on_disk(series: Series) -> dict[str, bytes]:
    return {name: (series.path / name).read_bytes() for name in series.names() if (series.path / name).is_file()}


def refresh(project: Project) -> str:
    """Writes the tree's commits to ``patches/``; returns a sentence."""
    tree, series = project.tree, project.series
    if not tree.exists():
        raise Refusal(f'{tree} does not exist: make it with "tree".')
    _require_clean(tree)
    if git.run("merge-base", "--is-ancestor", BASE, "HEAD", cwd=tree).returncode:
        raise Refusal(f'{tree} does not descend from its tag "{BASE}": make it anew with "tree --force".')
    fresh = exported(tree)
    for name, data in fresh.items():
        for change in patchfile.parse(name, data).changes:
            if change.kind == "add":
                raise Refusal(f"{name} would add {change.path}: new files belong in patches/files, not in a commit.")
    before = _on_disk(series)
    series.path.mkdir(exist_ok=True)
    for name, data in fresh.items():
        if before.get(name) != data:
            atomic_write(series.path / name, data)
    atomic_write(series.path / "series", "".join(f"{name}\n" for name in fresh).encode())
    for name in set(series.present()) - set(fresh):
        (series.path / name).unlink()
    git.output("update-ref", _SYNCED, "HEAD", cwd=tree)
    changed = sum(before.get(name) != data for name, data in fresh.items())
    return f"{len(fresh)} in the series: {changed} written, {len(fresh) - changed} as before."
