"""Taking the series out again, and what `status` says on the way."""

import json
import py_compile
import re
import shutil

import pytest
from elastic_tools.patchset import install
from elastic_tools.patchset.cli import main
from elastic_tools.patchset.errors import Refusal

from .conftest import NEW, UPSTREAM, make_site, replace, snapshot, write


def test_puts_everything_back(project, venv):
    before = snapshot(venv)
    install.apply(project, venv)
    assert snapshot(venv) != before
    install.revert(project, venv)
    assert snapshot(venv) == before


def test_removes_what_python_compiled_from_new_files(project, venv, site):
    before = snapshot(venv)
    install.apply(project, venv)
    for path in NEW:
        py_compile.compile(str(site / path))
    install.revert(project, venv)
    (site / "vllm/core/__pycache__").rmdir()
    assert snapshot(venv) == before


def test_leaves_files_that_the_series_did_not_bring(project, venv, site, capsys):
    install.apply(project, venv)
    write(site, {"vllm/elastic/mine.py": "x\n"})
    assert main(["revert", str(venv)], project.root) == 0
    assert "Left vllm/elastic: it holds files" in capsys.readouterr().out
    assert sorted(file.name for file in (site / "vllm/elastic").iterdir()) == ["mine.py"]


def test_does_not_need_the_series_that_was_applied(project, venv):
    before = snapshot(venv)
    install.apply(project, venv)
    shutil.rmtree(project.series.path)
    install.revert(project, venv)
    assert snapshot(venv) == before


def test_refuses_when_nothing_is_applied(project, venv, capsys):
    before = snapshot(venv)
    assert main(["revert", str(venv)], project.root) == 1
    assert "there is nothing to revert" in capsys.readouterr().err
    assert snapshot(venv) == before


@pytest.mark.parametrize("path", ["vllm/core/pool.py", "vllm/core/extra.py"])
def test_refuses_to_lose_an_edit(project, venv, site, path, capsys):
    install.apply(project, venv)
    with open(site / path, "a") as file:
        file.write("mine\n")
    before = snapshot(venv)
    assert main(["revert", str(venv)], project.root) == 1
    err = capsys.readouterr().err
    assert f"{path} was edited since the series was applied: save it elsewhere, " in err
    assert snapshot(venv) == before

    if kept := re.search(r"copy (\S+) over it, then revert", err):
        shutil.copy(kept[1], site / path)
    else:
        assert "remove it, then revert" in err
        (site / path).unlink()
    assert main(["revert", str(venv)], project.root) == 0
    assert main(["apply", str(venv)], project.root) == 0


def test_refuses_when_what_was_kept_is_damaged(project, venv, site):
    install.apply(project, venv)
    (site / "vllm/.elastic-kv/before/vllm/worker.py").write_text("")
    before = snapshot(venv)
    with pytest.raises(Refusal, match="is damaged"):
        install.revert(project, venv)
    assert snapshot(venv) == before


def test_a_broken_record_says_so(project, venv, site, capsys):
    install.apply(project, venv)
    (site / "vllm/.elastic-kv/record.json").write_text("{")
    for verb in ("status", "apply", "revert"):
        assert main([verb, str(venv)], project.root) == 1
        assert "record.json cannot be read" in capsys.readouterr().err


def test_cleans_up_after_a_reinstallation(project, venv, site):
    before = snapshot(venv)
    install.apply(project, venv)
    for path in ("vllm/core/pool.py", "vllm/core/windows.py", "vllm/worker.py"):
        kept = site / "vllm/.elastic-kv/before" / path
        shutil.copy2(kept, site / path)
    assert install.status(project, venv).state == install.HALF
    install.revert(project, venv)
    assert snapshot(venv) == before


def test_cleans_up_after_an_upgrade(project, venv, site):
    install.apply(project, venv)
    shutil.rmtree(site / "vllm-9.9.1.dist-info")
    make_site(venv, version="9.9.2")
    replace(site / "vllm/worker.py", "worker line 1\n", "worker line of the next release\n")
    install.revert(project, venv)
    assert (site / "vllm/worker.py").read_text().startswith("worker line of the next release")
    assert not (site / "vllm/elastic").exists()
    assert not (site / "vllm/.elastic-kv").exists()


def states(project, venv, capsys) -> tuple[int, dict]:
    code = main(["status", str(venv), "--json"], project.root)
    return code, json.loads(capsys.readouterr().out)


def test_status_tells_the_states_apart(project, venv, site, capsys):
    assert states(project, venv, capsys)[0] == 3
    install.apply(project, venv)
    code, found = states(project, venv, capsys)
    assert (code, found["state"], found["applied"]) == (0, "applied", project.series.hash())
    write(project.series.path / "files", {"vllm/core/extra.py": "EXTRA = 2\n"})
    code, found = states(project, venv, capsys)
    assert (code, found["state"]) == (6, "another series")
    assert found["applied"] != found["series"]
    (site / "vllm/worker.py").write_text(UPSTREAM["vllm/worker.py"])
    assert states(project, venv, capsys)[0] == 4
    (site / "vllm/worker.py").write_text("mine")
    code, found = states(project, venv, capsys)
    assert (code, found["files"]) == (5, ["vllm/worker.py"])


def test_status_for_people(project, venv, capsys):
    install.apply(project, venv)
    assert main(["status", str(venv)], project.root) == 0
    out = capsys.readouterr().out
    assert ": applied\n" in out
    assert f"series {project.series.hash()}\n" in out


def test_status_changes_nothing(project, venv):
    before = snapshot(venv)
    install.status(project, venv)
    assert snapshot(venv) == before
