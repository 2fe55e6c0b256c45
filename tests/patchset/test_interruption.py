"""A kill, or a failure, at every moment of `apply` and `revert`: the target is never lost."""

import os
import subprocess
import sys

import pytest
from elastic_tools.patchset import install, stage, txn
from elastic_tools.patchset.cli import main
from elastic_tools.patchset.errors import Refusal
from elastic_tools.patchset.target import find
from elastic_tools.pins import ROOT

from .conftest import snapshot, write

EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod", "os.chown", "os.symlink"}


def killed_after(count: int, work, below) -> bool:
    """Runs ``work`` in a child that dies at its ``count``-th deed on a file under ``below``, as from kill -9."""
    child = os.fork()
    if child == 0:
        left = count

        def hook(event, arguments):
            nonlocal left
            if event in EVENTS and arguments and str(arguments[0]).startswith(str(below)):
                left -= 1
                if left < 0:
                    os._exit(9)

        sys.addaudithook(hook)
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 9)
    return code == 9


@pytest.fixture
def prepared(project, venv, site):
    """The transaction of `apply`, without the part that only reads."""
    found = find(venv)
    plan, contents = install._plan(project, found, stage.stage(project.series, site).contents)
    return txn.Store(site), plan, contents


def take_back(project, venv) -> None:
    """Reverts from wherever an interruption left it."""
    state = install.status(project, venv).state
    assert state in (install.APPLIED, install.HALF, install.NOT_APPLIED)
    if state == install.NOT_APPLIED:
        with pytest.raises(Refusal, match="nothing to revert"):
            install.revert(project, venv)
    else:
        install.revert(project, venv)


def test_killed_at_any_moment_of_apply(project, venv, site, prepared):
    store, plan, contents = prepared
    before, kills = snapshot(venv), 0
    while killed_after(kills, lambda: store.install(plan, contents, set()), site):
        take_back(project, venv)
        assert snapshot(venv) == before
        kills += 1
    assert install.status(project, venv).state == install.APPLIED
    assert kills > 40


def test_killed_in_apply_then_applied_again(project, venv, site, prepared):
    store, plan, contents = prepared
    before = snapshot(venv)
    for kills in range(5, 200, 9):
        killed_after(kills, lambda: store.install(plan, contents, set()), site)
        if install.status(project, venv).state == install.APPLIED:
            break
        install.apply(project, venv)
        assert install.status(project, venv).state == install.APPLIED
        assert not store.journal.exists()
        install.revert(project, venv)
        assert snapshot(venv) == before
    assert kills > 40


def test_killed_at_any_moment_of_revert(project, venv, site, prepared):
    before = snapshot(venv)
    store, plan, contents = prepared
    store.install(plan, contents, set())
    kills = 0
    while killed_after(kills, lambda: store.restore(plan), site):
        take_back(project, venv)
        assert snapshot(venv) == before
        store.install(plan, contents, set())
        kills += 1
    assert snapshot(venv) == before
    assert kills > 30


@pytest.mark.parametrize("recovers", [True, False])
def test_a_failing_move(project, venv, site, monkeypatch, capsys, recovers):
    before = snapshot(venv)
    real, moves = txn.move, len(project.series.touched()) + len(project.series.files())
    for failing in range(moves):
        calls = 0

        def move(source, place, failing=failing):
            nonlocal calls
            calls += 1
            if calls == failing + 1 or (calls > failing and not recovers):
                raise OSError(5, "Input/output error", str(place))
            real(source, place)

        monkeypatch.setattr(txn, "move", move)
        assert main(["apply", str(venv)], project.root) == 1
        err = capsys.readouterr().err
        monkeypatch.setattr(txn, "move", real)
        if snapshot(venv) == before:
            assert "Input/output error; nothing was changed." in err
        else:
            assert not recovers
            assert "interrupted half-way, and revert undoes it" in err
            assert main(["status", str(venv)], project.root) == install.EXIT_CODES[install.HALF]
            assert main(["revert", str(venv)], project.root) == 0
            capsys.readouterr()
        assert snapshot(venv) == before


@pytest.mark.parametrize("call", ["move", "remove"])
def test_a_failing_revert_is_done_by_the_next(project, venv, monkeypatch, capsys, call):
    before = snapshot(venv)
    install.apply(project, venv)

    def fail(*_):
        raise OSError(5, "Input/output error", "x")

    real = getattr(txn, call)
    monkeypatch.setattr(txn, call, fail)
    assert main(["revert", str(venv)], project.root) == 1
    assert "revert undoes it" in capsys.readouterr().err
    monkeypatch.setattr(txn, call, real)
    assert main(["revert", str(venv)], project.root) == 0
    assert snapshot(venv) == before


def test_control_c_leaves_nothing(project, venv, monkeypatch, capsys):
    before, real, calls = snapshot(venv), txn.move, []

    def move(source, place):
        calls.append(place)
        if len(calls) == 3:
            raise KeyboardInterrupt
        real(source, place)

    monkeypatch.setattr(txn, "move", move)
    assert main(["apply", str(venv)], project.root) == 1
    assert capsys.readouterr().err.startswith("patchset: interrupted; no file is half-written")
    assert snapshot(venv) == before


def test_a_termination_leaves_nothing(venv, tmp_path):
    """The real command, which gets SIGTERM while git works for it."""
    before = snapshot(venv)
    write(tmp_path, {"bin/git": "#!/bin/sh\nkill -TERM $PPID\nexec sleep 60\n", "scratch/.keep": ""})
    (tmp_path / "bin/git").chmod(0o755)
    command = [sys.executable, ROOT / "scripts" / "patchset", "apply", "--force-version", venv]
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "TMPDIR": str(tmp_path / "scratch")}
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (result.returncode, result.stderr.partition(";")[0]) == (1, "patchset: interrupted")
    assert os.listdir(tmp_path / "scratch") == [".keep"]
    assert snapshot(venv) == before


def test_an_edit_after_an_interruption_is_not_lost(project, venv, site, prepared, capsys):
    store, plan, contents = prepared
    moved = plan.entries[0]
    count = 0
    while killed_after(count, lambda: store.install(plan, contents, set()), site):
        if store.journal.exists() and store.now(moved.path) == moved.after:
            break
        count += 5
    (site / moved.path).write_text("mine\n")
    for verb in ("apply", "revert"):
        assert main([verb, str(venv)], project.root) == 1
        assert f"{moved.path} was edited since" in capsys.readouterr().err
    assert (site / moved.path).read_text() == "mine\n"
