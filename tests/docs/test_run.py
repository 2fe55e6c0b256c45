"""Runs the commands of the documents that need no engine. Each stands here as it stands there."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from elastic_tools.patchset import tree
from elastic_tools.patchset.project import Project
from elastic_tools.pins import CACHE, ROOT, VENV
from patchset.conftest import NEW, commit, make_empty_project, plain_git, replace, write

PATHS = f"{VENV / 'bin'}:{os.environ['PATH']}"
WHO = {f"GIT_{role}_{what}": "x@example.org" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}


def run(line: str, at: Path, scripts: Path = ROOT / "scripts", expected: int = 0, **filled: Path | str) -> str:
    """The output of a command line in a shell. `filled`: what stands for its placeholders."""
    for name, value in filled.items():
        line = line.replace(name, str(value))
    if line.startswith("scripts/"):
        line = f"{scripts}{line.removeprefix('scripts')}"
    environment = os.environ | WHO | {"PATH": PATHS, "GIT_EDITOR": "true"}
    result = subprocess.run(line, shell=True, cwd=at, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == expected, result.stdout + result.stderr
    return result.stdout + result.stderr


@pytest.fixture
def release(tmp_path):
    """What the series touches, of the pinned release, as a source tree in git."""
    place = tmp_path / "vllm-source"
    for path in [*Project.at(ROOT).series.touched(), "vllm/__init__.py"]:
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(CACHE / "upstream" / path, place / path)
    write(place, {"PKG-INFO": f"Metadata-Version: 2.4\nName: vllm\nVersion: {Project.at(ROOT).version}\n"})
    plain_git("init", "--quiet", cwd=place)
    plain_git("add", ".", cwd=place)
    plain_git("commit", "--quiet", "-m", "upstream", cwd=place)
    return place


def test_make_lists_its_commands():
    assert "make serve" in run("make", ROOT)


def test_storm_help(tmp_path):
    assert "--seconds" in run("scripts/storm --help", tmp_path)


def test_the_environment_is_patched():
    run("scripts/patchset status .venv", ROOT)  # 0: applied


def test_the_series_comes_and_goes(release, tmp_path):
    run("scripts/patchset survey DIR", tmp_path, DIR=release)
    run("scripts/patchset apply DIR", tmp_path, DIR=release)
    assert (release / "vllm/v1/elastic_kv/arena.py").exists()
    run("scripts/patchset status DIR", tmp_path, DIR=release)
    run("scripts/patchset revert DIR", tmp_path, DIR=release)
    assert plain_git("status", "--porcelain", cwd=release) == ""
    run("scripts/patchset status DIR", tmp_path, expected=3, DIR=release)


def test_a_fork(release, tmp_path):
    """Both ways of docs/rebasing.md, on a fork with a line of its own above a hunk."""
    for path in Project.at(ROOT).series.touched()[:1]:
        (release / path).write_text((release / path).read_text() + "# ours\n")
    plain_git("commit", "--quiet", "--all", "-m", "ours", cwd=release)
    fork = shutil.copytree(release, tmp_path / "fork")
    run("scripts/patchset survey FORK", tmp_path, FORK=fork)
    run("scripts/patchset apply --force-version FORK", tmp_path, FORK=fork)
    run("scripts/patchset status FORK", tmp_path, FORK=fork)
    run("scripts/patchset export -o elastic-kv.mbox", release)
    run("git am --keep-cr elastic-kv.mbox", release)
    run("scripts/patchset status FORK", tmp_path, FORK=release)


def test_a_later_release(release, tmp_path):
    new = shutil.copytree(release, tmp_path / "new")
    core = new / "vllm/v1/engine/core.py"
    core.write_text("# later\n" + core.read_text())
    (tmp_path / "docs/results").mkdir(parents=True)
    line = "scripts/patchset survey SOURCE -o docs/results/rebase-VERSION.md"
    run(line, tmp_path, SOURCE=new, VERSION="1.2.3")
    assert "core.py" in (tmp_path / "docs/results/rebase-1.2.3.md").read_text()
    line = "git diff --no-index OLD/vllm/v1/engine/core.py NEW/vllm/v1/engine/core.py"
    assert "+# later" in run(line, tmp_path, expected=1, OLD=release, NEW=new)  # 1: they differ


def test_changing_the_series(tmp_path):
    """The four steps of docs/patches.md, in a small project with the scripts of this one."""
    project = make_empty_project(tmp_path / "project")
    write(project.root / "patches" / "files", NEW)
    shutil.copytree(ROOT / "scripts", project.root / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    tree.make(project)
    replace(project.tree / "vllm/worker.py", "worker line 9\n", "worker line nine\n")
    commit(project.tree, "worker: nine")
    tree.refresh(project)
    scripts = project.root / "scripts"

    run("scripts/patchset tree", project.root, scripts)
    replace(project.tree / "vllm/worker.py", "worker line 12\n", "worker line twelve\n")
    run("git add --update", project.tree)
    run("git commit --amend", project.tree)
    run("git rebase -i upstream", project.tree)
    assert "1 written" in run("scripts/patchset refresh", project.root, scripts)
    run("scripts/patchset check", project.root, scripts)
    assert "+worker line twelve" in (project.series.path / "0001-worker-nine.patch").read_text()


def test_the_planner(tmp_path):
    assert "H100" in run("scripts/plan recommend --model Llama-3.1-8B --gpu H100", tmp_path)
    assert "fp8" in run("scripts/plan estimate --model Llama-3.1-8B --gpu H100 --cache fp8", tmp_path)
    line = (
        "scripts/plan compare --model Qwen2.5-14B --gpu A100 H100 --tp 1 2 --cache bf16 fp8 "
        "--csv plans.csv --plot plans.png"
    )
    run(line, tmp_path)
    assert len((tmp_path / "plans.csv").read_text().splitlines()) == 1 + 8  # 2 GPUs, 2 degrees, 2 caches
    assert (tmp_path / "plans.png").read_bytes().startswith(b"\x89PNG")
    assert "10.00" in run("scripts/plan recommend --model Llama-3.1-70B --workload document --price H100=2.5", tmp_path)
    run("scripts/plan emit --model Llama-3.1-8B --gpu H100 > serve.yaml", tmp_path)
    assert "max-num-batched-tokens" in yaml.safe_load((tmp_path / "serve.yaml").read_text())
