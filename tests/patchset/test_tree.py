"""The editable tree and its export."""

import os
import shutil

import pytest
from elastic_tools.patchset import check, tree
from elastic_tools.patchset.errors import Refusal

from .conftest import HEADER, NEW, UPSTREAM, commit, make_sdist, plain_git, replace, write


def on_disk(project):
    return {file.name: file.read_bytes() for file in project.series.path.iterdir() if file.is_file()}


def test_holds_upstream_then_a_commit_per_patch(project):
    assert plain_git("log", "--format=%s", "--reverse", cwd=project.tree).splitlines() == [
        "vLLM 9.9.1, source release",
        "pool: grow",
        "Pool & Windows: say it in words",
        "worker: übersetzt",
    ]
    assert plain_git("status", "--porcelain", cwd=project.tree) == ""
    assert plain_git("ls-files", "vllm/_version.py", cwd=project.tree), "files that upstream ignores are in the base"


def test_belongs_to_the_caller(project):
    assert {(project.tree / name).stat().st_uid for name in ("PKG-INFO", "vllm")} == {os.getuid()}


def test_names_patches_after_their_subjects(project):
    assert project.series.names() == [
        "0001-pool-grow.patch",
        "0002-pool-windows-say-it-in-words.patch",
        "0003-worker-bersetzt.patch",
    ]


def test_new_files_are_links_to_where_they_are_edited(project):
    shutil.rmtree(project.tree)
    tree.make(project)
    for path, text in NEW.items():
        assert (project.tree / path).read_text() == text
    assert (project.tree / "vllm/elastic").is_symlink(), "a folder that upstream lacks is one link"
    assert not (project.tree / "vllm/core").is_symlink()
    (project.tree / "vllm/elastic/more.py").write_text("MORE = 1\n")
    assert "vllm/elastic/more.py" in project.series.files()
    assert plain_git("status", "--porcelain", cwd=project.tree) == ""


def test_links_follow_new_files_that_come_and_go(project):
    (project.series.path / "files/vllm/core/extra.py").unlink()
    write(project.series.path / "files", {"vllm/late.py": "LATE = 1\n"})
    tree.make(project)
    assert not (project.tree / "vllm/core/extra.py").is_symlink()
    assert (project.tree / "vllm/late.py").read_text() == "LATE = 1\n"
    assert plain_git("status", "--porcelain", cwd=project.tree) == ""


def test_refuses_a_new_file_that_upstream_has(project):
    write(project.series.path / "files", {"vllm/worker.py": ""})
    with pytest.raises(Refusal, match=r"vllm/worker\.py is in patches/files, but upstream has"):
        tree.make(project)


def test_export_of_a_fresh_tree_is_the_same_bytes(project, monkeypatch, tmp_path):
    before = on_disk(project)
    shutil.rmtree(project.tree)
    (tmp_path / "gitconfig").write_text(
        "[diff]\nnoprefix = true\ncontext = 9\nalgorithm = patience\n[format]\nsignOff = true\nattach = x\n"
        "[core]\nautocrlf = true\nabbrev = 5\n[am]\nkeepcr = false\n"
    )
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    monkeypatch.setenv("GIT_AUTHOR_NAME", "Nobody")
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    tree.make(project)
    head = plain_git("rev-parse", "HEAD", cwd=project.tree)
    assert "3 in the series: 0 written, 3 as before" in tree.refresh(project)
    assert on_disk(project) == before
    shutil.rmtree(project.tree)
    tree.make(project)
    assert plain_git("rev-parse", "HEAD", cwd=project.tree) == head, "commits are the same too"


def test_refresh_renames_removes_and_lists(project):
    plain_git("reset", "--quiet", "--hard", "HEAD~2", cwd=project.tree)
    replace(project.tree / "vllm/worker.py", "worker line 9", "worker line nine")
    commit(project.tree, "worker: nine, " + "and a subject that goes on and on " * 3)
    assert "2 in the series: 1 written, 1 as before" in tree.refresh(project)
    names = project.series.names()
    assert names == project.series.present()
    assert names[1] == "0002-worker-nine-and-a-subject-that-goes-on-and-on.patch"


def test_refresh_refuses_changes_that_are_not_committed(project):
    replace(project.tree / "vllm/worker.py", "worker line 9", "worker line nine")
    before = on_disk(project)
    with pytest.raises(Refusal, match=r"not committed: vllm/worker\.py\.$"):
        tree.refresh(project)
    write(project.tree, {"vllm/stray.py": ""})
    with pytest.raises(Refusal, match="and 1 more"):
        tree.refresh(project)
    assert on_disk(project) == before


def test_refresh_refuses_a_commit_that_adds_a_file(project):
    write(project.tree, {"vllm/stray.py": "x = 1\n"})
    plain_git("add", ".", cwd=project.tree)
    commit(project.tree, "stray")
    with pytest.raises(Refusal, match=r"would add vllm/stray\.py: new files belong in patches/files"):
        tree.refresh(project)


def test_refresh_refuses_merges_and_missing_trees(project):
    plain_git("checkout", "--quiet", "-b", "side", "HEAD~1", cwd=project.tree)
    replace(project.tree / "vllm/worker.py", "worker line 29", "side")
    commit(project.tree, "side")
    plain_git("merge", "--quiet", "--no-edit", "main", cwd=project.tree)
    with pytest.raises(Refusal, match="merge commit"):
        tree.refresh(project)
    shutil.rmtree(project.tree)
    with pytest.raises(Refusal, match="does not exist: make it"):
        tree.refresh(project)


def test_refuses_a_message_that_git_am_would_cut(project):
    replace(project.tree / "vllm/worker.py", "worker line 29", "x")
    commit(project.tree, "cut", HEADER + "\ndiff --git a/x b/x\n")
    tree.refresh(project)
    assert check.main(project) == 1


def test_tree_keeps_work_that_is_not_exported(project):
    replace(project.tree / "vllm/worker.py", "worker line 9", "worker line nine")
    with pytest.raises(Refusal, match="not committed"):
        tree.make(project)
    commit(project.tree, "nine")
    with pytest.raises(Refusal, match="commits that are not in patches/"):
        tree.make(project)
    tree.make(project, force=True)
    assert "nine" not in (project.tree / "vllm/worker.py").read_text()


def test_tree_takes_patches_that_others_changed(project):
    last = project.series.names()[-1]
    (project.series.path / last).unlink()
    (project.series.path / "series").write_text("".join(f"{name}\n" for name in project.series.names()[:-1]))
    tree.make(project)
    assert len(plain_git("log", "--format=%s", cwd=project.tree).splitlines()) == 3


def test_tree_starts_anew_for_another_release(project):
    sha = make_sdist(project.root, UPSTREAM | {"vllm/later.py": "x\n"})
    pins = project.root / "configs/pins.toml"
    pins.write_text(pins.read_text().replace(project.sha256, sha))
    tree.make(type(project).at(project.root))
    assert plain_git("ls-files", "vllm/later.py", cwd=project.tree)


def test_a_patch_that_does_not_fit_waits_to_be_mended(project):
    patch = project.series.path / project.series.names()[1]
    patch.write_bytes(patch.read_bytes().replace(b"-pool line 50", b"-pool line 5x"))
    with pytest.raises(Refusal, match=r"0002.* does not fit at vllm/core/pool.py, hunk at line 48.*am --continue"):
        tree.make(project)
    with pytest.raises(Refusal, match='in the middle of "git am"'):
        tree.refresh(project)
    replace(project.tree / "vllm/core/pool.py", "pool line 50\n", "pool line fifty\n")
    plain_git("add", "-u", cwd=project.tree)
    plain_git("am", "--continue", cwd=project.tree)
    tree.refresh(project)
    assert len(project.series.names()) == 3


def test_an_empty_series_makes_a_tree(empty):
    assert "0 patches" in tree.make(empty)
    assert "0 in the series" in tree.refresh(empty)
    assert empty.series.names() == []
