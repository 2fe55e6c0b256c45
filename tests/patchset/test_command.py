"""The launcher itself, and the repository's own series."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from elastic_tools.patchset import check
from elastic_tools.patchset.cli import main, parser
from elastic_tools.patchset.project import Project
from elastic_tools.pins import ROOT

LAUNCHER = ROOT / "scripts" / "patchset"


def test_runs_with_a_bare_python():
    result = subprocess.run([sys.executable, "-E", "-s", "-S", LAUNCHER, "--help"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    for verb in ("fetch", "tree", "refresh", "check", "apply", "revert", "status", "export"):
        assert verb in result.stdout


def test_imports_only_the_standard_library():
    for file in Path(check.__file__).parent.glob("*.py"):
        for name in re.findall(r"^(?:from|import) (\w+)", file.read_text(), re.MULTILINE):
            assert name in sys.stdlib_module_names | {"elastic_tools"}, f"{file.name} imports {name}"


@pytest.mark.parametrize("arguments", [[], ["apply"], ["nonsense"], ["status", "--nonsense", "."]])
def test_wrong_usage_is_exit_code_2(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        parser().parse_args(arguments)
    assert end.value.code == 2
    assert "usage: patchset" in capsys.readouterr().err


def test_an_incomplete_checkout_says_so(tmp_path, capsys):
    assert main(["check"], tmp_path) == 1
    assert "pins.toml is missing" in capsys.readouterr().err


def test_missing_git_says_so(project, venv, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/nonexistent")
    assert main(["apply", str(venv)], project.root) == 1
    assert capsys.readouterr().err == "patchset: git is not installed, or not on PATH.\n"


@pytest.mark.parametrize("test", [check.parses, check.listed, check.numbered, check.headed])
def test_this_repository_s_series(test):
    """What needs no download; `scripts/patchset check` does the rest."""
    assert test(Project.at(ROOT)) == []


def test_a_reader_that_has_enough_is_no_failure():
    """`scripts/patchset export | head`: more than a pipe holds is written to nobody."""
    command = subprocess.Popen([LAUNCHER, "export"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert command.stdout is not None
    assert command.stderr is not None
    command.stdout.read(1)
    command.stdout.close()
    assert command.stderr.read() == b""
    command.wait()
