"""The mailbox, taken by a real `git am`."""

import pytest
from elastic_tools.patchset import install
from elastic_tools.patchset.cli import main
from elastic_tools.patchset.errors import Refusal

from .conftest import NEW, UPSTREAM, plain_git, write


@pytest.fixture
def fork(tmp_path):
    root = tmp_path / "fork"
    write(root, UPSTREAM | {"vllm/worker.py": "fork\n" * 4 + "\n" * 8 + UPSTREAM["vllm/worker.py"]})
    plain_git("init", "--quiet", cwd=root)
    plain_git("config", "core.autocrlf", "false", cwd=root)
    plain_git("add", "--force", ".", cwd=root)
    plain_git("commit", "--quiet", "-m", "fork", cwd=root)
    return root


def test_a_fork_takes_everything_with_one_command(project, fork, tmp_path):
    box = tmp_path / "elastic.mbox"
    assert main(["export", "-o", str(box)], project.root) == 0
    plain_git("am", "--keep-cr", str(box), cwd=fork)
    subjects = plain_git("log", "--format=%s", "--reverse", cwd=fork).splitlines()[1:]
    assert subjects[0] == "elastic-kv: add the new modules"
    assert len(subjects) == 1 + len(project.series.names())
    for path, text in NEW.items():
        assert (fork / path).read_text() == text
    for path in ("vllm/core/pool.py", "vllm/core/windows.py"):
        assert (fork / path).read_bytes() == (project.tree / path).read_bytes()
    found = install.status(project, fork)
    assert (found.state, found.recorded) == (install.APPLIED, False)
    with pytest.raises(Refusal, match="already applied"):
        install.apply(project, fork)
    with pytest.raises(Refusal, match="use git to revert"):
        install.revert(project, fork)


def test_the_mailbox_is_the_same_bytes_each_time(project, tmp_path, capfdbinary):
    assert main(["export"], project.root) == 0
    first = capfdbinary.readouterr().out
    assert main(["export"], project.root) == 0
    assert capfdbinary.readouterr().out == first
    assert first.startswith(b"From 0000")


def test_without_patches_the_mailbox_adds_the_new_files(empty, fork, tmp_path):
    write(empty.series.path / "files", NEW)
    main(["export", "-o", str(tmp_path / "m")], empty.root)
    plain_git("am", str(tmp_path / "m"), cwd=fork)
    assert (fork / "vllm/core/extra.py").is_file()


def test_says_when_it_cannot_be_written(project, tmp_path, capsys):
    assert main(["export", "-o", str(tmp_path / "no" / "m")], project.root) == 1
    assert "No such file or directory" in capsys.readouterr().err
