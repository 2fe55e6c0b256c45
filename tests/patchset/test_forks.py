"""The series on trees that have moved: what a fork of vLLM looks like after a while. docs/rebasing.md has the table."""

import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
from elastic_tools.patchset import install
from elastic_tools.patchset.cli import main
from elastic_tools.patchset.project import Project
from elastic_tools.pins import CACHE, ROOT

from .conftest import NEW, UPSTREAM, plain_git, replace, snapshot, write

POOL, WINDOWS, WORKER = "vllm/core/pool.py", "vllm/core/windows.py", "vllm/worker.py"


def make_fork(root: Path, files: dict[str, str] = UPSTREAM) -> Path:
    """A repository with upstream's files, each line end as it is."""
    write(root, files)
    plain_git("init", "--quiet", cwd=root)
    plain_git("config", "core.autocrlf", "false", cwd=root)
    return committed(root, "upstream")


def committed(root: Path, subject: str) -> Path:
    plain_git("add", "--force", "--all", ".", cwd=root)
    plain_git("commit", "--quiet", "-m", subject, cwd=root)
    return root


def take(project: Project, fork: Path, *options: str) -> None:
    """The mailbox, as docs/rebasing.md says to take it."""
    box = fork.parent / "elastic-kv.mbox"
    assert main(["export", "-o", str(box)], project.root) == 0
    plain_git("am", "--keep-cr", *options, str(box), cwd=fork)


def test_50_commits_of_its_own(project, tmp_path):
    """Above, below and between the hunks, and in other files."""
    fork = make_fork(tmp_path / "fork")
    for number in range(50):
        path = (POOL, WORKER, "vllm/ours.py", "README.md")[number % 4]
        text = (fork / path).read_text() if (fork / path).exists() else ""
        # Alternately above all hunks and below them.
        line = f"ours {number}\n"
        write(fork, {path: line + text if number % 8 < 4 else text + line})
        committed(fork, f"ours {number}")
    take(project, fork)
    assert len(plain_git("log", "--format=%s", cwd=fork).splitlines()) == 1 + 50 + 1 + len(project.series.names())
    assert sorted(line for line in (fork / POOL).read_text().splitlines() if line.startswith("ours ")) == sorted(
        f"ours {number}" for number in range(0, 50, 4)
    )
    assert "pool grows\n" in (fork / POOL).read_text()
    assert install.status(project, fork).state == install.APPLIED


@pytest.mark.parametrize("way", ["apply", "am"])
def test_shifted_lines(project, tmp_path, way, capsys):
    fork = make_fork(tmp_path / "fork")
    replace(fork / POOL, "pool line 40\n", "ours\n" * 100 + "pool line 40\n")
    committed(fork, "ours")
    if way == "am":
        take(project, fork)
    else:
        assert main(["apply", str(fork)], project.root) == 1
        assert "lines were added or removed above it; --force-version allows that" in capsys.readouterr().err
        assert main(["apply", str(fork), "--force-version"], project.root) == 0
        assert capsys.readouterr().out.count("offset 100 lines") == 1, "only the hunk below"
    expected = (project.tree / POOL).read_text().replace("pool line 40\n", "ours\n" * 100 + "pool line 40\n")
    assert (fork / POOL).read_text() == expected


@pytest.mark.parametrize("way", ["apply", "am"])
def test_a_renamed_neighbour(project, tmp_path, way):
    fork = make_fork(tmp_path / "fork")
    plain_git("mv", "tests/test_pool.py", "vllm/core/test_pool.py", cwd=fork)
    plain_git("mv", "vllm/core/__init__.py", "vllm/core/base.py", cwd=fork)
    committed(fork, "move things")
    if way == "am":
        take(project, fork)
    else:
        install.apply(project, fork)
    assert (fork / POOL).read_bytes() == (project.tree / POOL).read_bytes()
    assert install.status(project, fork).state == install.APPLIED


@pytest.mark.parametrize("gone", ["renamed", "deleted"])
def test_a_file_of_the_series_that_is_not_there(project, tmp_path, gone, capsys):
    fork = make_fork(tmp_path / "fork")
    (fork / POOL).rename(fork / "vllm/core/block_pool.py")
    if gone == "deleted":
        (fork / "vllm/core/block_pool.py").unlink()
    committed(fork, "ours")
    before = snapshot(fork)
    assert main(["apply", "--force-version", str(fork)], project.root) == 1
    assert f"{POOL} is missing, which the series changes" in capsys.readouterr().err
    assert snapshot(fork) == before


def test_a_renamed_file_of_the_series_is_followed_by_a_three_way_merge(project, tmp_path):
    fork = make_fork(tmp_path / "fork")
    plain_git("mv", WORKER, "vllm/the_worker.py", cwd=fork)
    committed(fork, "rename")
    take(project, fork, "--3way")
    assert "fünfzehn" in (fork / "vllm/the_worker.py").read_text()
    assert not (fork / WORKER).exists()


def test_crlf(project, tmp_path, capsys):
    """Every line differs: it is refused rather than mended, and applies once line ends are upstream's again."""
    crlf = {path: text.replace("\r\n", "\n").replace("\n", "\r\n") for path, text in UPSTREAM.items()}
    fork = make_fork(tmp_path / "fork", crlf)
    before = snapshot(fork)
    assert main(["apply", "--force-version", str(fork)], project.root) == 1
    assert (
        "does not fit: the file has CRLF line ends, and upstream's are LF; convert it first" in capsys.readouterr().err
    )
    assert snapshot(fork) == before
    with pytest.raises(subprocess.CalledProcessError):
        take(project, fork)
    plain_git("am", "--abort", cwd=fork)
    assert snapshot(fork) == before | {key: value for key, value in snapshot(fork).items() if key not in before}

    write(fork, UPSTREAM)
    committed(fork, "line ends as upstream has them")
    take(project, fork)
    assert (fork / WINDOWS).read_bytes() == (project.tree / WINDOWS).read_bytes()


def test_crlf_that_git_made_in_the_checkout(project, tmp_path):
    """With core.autocrlf git itself holds upstream's line ends, and `git am` takes the mailbox."""
    origin = make_fork(tmp_path / "origin")
    fork = tmp_path / "fork"
    plain_git("clone", "--quiet", "--config", "core.autocrlf=true", str(origin), str(fork), cwd=tmp_path)
    assert b"\r\n" in (fork / POOL).read_bytes()
    take(project, fork)
    assert plain_git("status", "--porcelain", cwd=fork) == ""
    for path in (POOL, WORKER):
        assert plain_git("show", f"HEAD:{path}", cwd=fork) == (project.tree / path).read_text()


def test_a_vendored_subset(project, tmp_path, capsys):
    """No git, no version, no tests, not all of the package."""
    part = {path: text for path, text in UPSTREAM.items() if path.startswith("vllm/") and "_version" not in path}
    write(tmp_path / "third_party", part)
    assert main(["apply", str(tmp_path / "third_party")], project.root) == 1
    assert "does not say which vLLM it is" in capsys.readouterr().err
    assert main(["apply", "--force-version", str(tmp_path / "third_party")], project.root) == 0
    for path in (POOL, WINDOWS, WORKER):
        assert (tmp_path / "third_party" / path).read_bytes() == (project.tree / path).read_bytes()
    for path, text in NEW.items():
        assert (tmp_path / "third_party" / path).read_text() == text
    before = {path: text.encode() for path, text in part.items()}
    install.revert(project, tmp_path / "third_party")
    assert {path: (tmp_path / "third_party" / path).read_bytes() for path in part} == before


def test_a_changed_line_stops_the_mailbox(project, tmp_path):
    """Nothing is half there: `git am --abort` gives the fork back as it was."""
    fork = make_fork(tmp_path / "fork")
    replace(fork / POOL, "pool line 50\n", "pool line fifty of ours\n")
    committed(fork, "ours")
    before = (fork / POOL).read_text()
    with pytest.raises(subprocess.CalledProcessError) as stopped:
        take(project, fork)
    assert f"patch failed: {POOL}" in stopped.value.stderr
    plain_git("am", "--abort", cwd=fork)
    assert (fork / POOL).read_text() == before
    assert plain_git("log", "--format=%s", cwd=fork).splitlines() == ["ours", "upstream"]


def test_the_real_series_on_upstream_with_50_commits(tmp_path):
    """The files that the series touches, of the very release, with lines of others above and below.

    Above only where the series does not change a file's first lines: git wants those at the file's beginning.
    """
    project, upstream = Project.at(ROOT), CACHE / "upstream"
    fork = tmp_path / "fork"
    for path in [*project.series.touched(), "vllm/__init__.py"]:
        (fork / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(upstream / path, fork / path)
    make_fork(fork, {})
    touched = project.series.touched()
    first = re.compile(rb"^--- a/(.*)\n.*\n@@ -1,", re.MULTILINE)
    first_lines = {path.decode() for patch in project.series.patches() for path in first.findall(patch.data)}
    assert 2 * len(first_lines) < len(touched)
    for number in range(50):
        path = touched[number % len(touched)]
        text = (fork / path).read_text()
        below = path in first_lines or number % 2
        write(fork, {path: f"{text}# ours {number}\n" if below else f"# ours {number}\n{text}"})
        committed(fork, f"ours {number}")
    take(project, fork)
    for path in touched:
        ours = [line for line in (fork / path).read_text().splitlines(keepends=True) if not line.startswith("# ours ")]
        assert "".join(ours) == Path(sysconfig.get_path("purelib"), path).read_text(), path
    assert install.status(project, fork).state == install.APPLIED
