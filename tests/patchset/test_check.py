"""`check` finds each thing that can be wrong with a series."""

import pytest
from elastic_tools.patchset import check, fetch, tree
from elastic_tools.patchset.series import Series

from .conftest import NEW, commit, plain_git, replace, write


def run(project, capsys) -> tuple[int, str]:
    capsys.readouterr()
    code = check.main(project)
    return code, capsys.readouterr().out


def edit(project, number, old, new):
    file = project.series.path / project.series.names()[number - 1]
    data = file.read_bytes()
    assert old in data
    file.write_bytes(data.replace(old, new))


def test_a_good_series_passes(project, capsys):
    code, out = run(project, capsys)
    assert code == 0, out
    assert out.count("ok  ") == len(check.CHECKS)
    assert f"3 patches, 3 new files, series {project.series.hash()[:12]}" in out


def test_an_empty_series_passes(empty, capsys):
    assert run(empty, capsys)[0] == 0


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda p: edit(p, 1, b"+pool grows\n", b""), "0001-pool-grow.patch has a hunk that is shorter"),
        (lambda p: edit(p, 1, b"Why: ", b"Because: "), '0001-pool-grow.patch has no "Why:" paragraph'),
        (lambda p: edit(p, 1, b"not sent", b"no"), '0001-pool-grow.patch has Upstream-Status "no"'),
        (lambda p: (p.series.path / "0004-x.patch").write_text("x"), "0004-x.patch is in patches/, but is not listed"),
        (
            lambda p: (p.series.path / "series").write_text("\n".join([*p.series.names(), p.series.names()[0]])),
            "0001-pool-grow.patch is listed 2 times",
        ),
        (
            lambda p: (p.series.path / p.series.names()[2]).unlink(),
            "0003-worker-bersetzt.patch is listed, but is not in patches/",
        ),
        (
            lambda p: (p.series.path / "series").write_text("\n".join(p.series.names()[1:])),
            "0002-pool-windows-say-it-in-words.patch stands where 0001 is due",
        ),
        (lambda p: (p.series.path / "series").write_text("pool.patch\n"), "pool.patch is not named NNNN-topic.patch"),
        (lambda p: edit(p, 3, b"vllm/worker.py", b"tests/test_pool.py"), "is not part of an installed vLLM"),
        (lambda p: edit(p, 3, b"vllm/worker.py", b"vllm/nothing.py"), "which upstream does not have"),
        (
            lambda p: edit(p, 3, b"index ", b"old mode 100644\nnew mode 100755\nindex "),
            "does not just edit vllm/worker.py (mode)",
        ),
        (
            lambda p: write(p.series.path / "files", {"vllm/worker.py": ""}),
            "patches/files/vllm/worker.py exists upstream",
        ),
        (lambda p: write(p.series.path / "files", {"docs/x.md": ""}), "patches/files/docs/x.md is outside vllm/"),
        (
            lambda p: edit(p, 1, b" pool line 28\n", b" pool line xx\n"),
            "vllm/core/pool.py, hunk at line 28, does not fit",
        ),
        (lambda p: edit(p, 1, b"@@ -28,6 +28,7 @@", b"@@ -25,6 +25,7 @@"), "found at line 28 (offset 3 lines)"),
        (lambda p: edit(p, 1, b"@@ pool", b"@@ pond"), "0001-pool-grow.patch would be exported with other bytes"),
        (
            lambda p: edit(p, 1, b"[PATCH] pool: grow", b"[PATCH] pool: swell"),
            "would be exported as 0001-pool-swell.patch",
        ),
        (lambda p: edit(p, 1, b"000000 Mon", b"000001 Mon"), "0001-pool-grow.patch would be exported with other bytes"),
    ],
)
def test_says_what_is_wrong(project, capsys, spoil, sentence):
    spoil(project)
    code, out = run(project, capsys)
    assert code == 1
    assert sentence in out
    assert "FAIL" in out
    assert "checks failed" in out


def test_a_patch_that_adds_a_file(project, capsys):
    write(project.tree, {"vllm/stray.py": "x = 1\n"})
    plain_git("add", ".", cwd=project.tree)
    commit(project.tree, "stray")
    name, data = list(tree.exported(project.tree).items())[-1]
    (project.series.path / name).write_bytes(data)
    with open(project.series.path / "series", "a") as file:
        file.write(name + "\n")
    assert f"{name} adds vllm/stray.py: new files belong in patches/files" in run(project, capsys)[1]


def test_the_small_tree_stands_for_the_whole_one(project, tmp_path):
    at = tmp_path / "again"
    at.mkdir()
    check.small_tree(project.series, fetch.ensure_source(project), at)
    assert tree.exported(at) == tree.exported(project.tree)


def test_the_hash_is_of_order_names_and_content(project):
    series = project.series
    seen = {series.hash()}
    assert Series(series.path).hash() in seen
    write(series.path / "files", {"vllm/elastic/__pycache__/x.pyc": "", "vllm/elastic/.x.swp": "", "vllm/x.py~": ""})
    assert series.hash() in seen, "litter does not count"
    for change in (
        lambda: write(series.path / "files", {"vllm/core/extra.py": NEW["vllm/core/extra.py"] + "\n"}),
        lambda: (series.path / "files/vllm/core/extra.py").rename(series.path / "files/vllm/core/other.py"),
        lambda: replace(series.path / "0001-pool-grow.patch", "grows", "swells"),
        lambda: (series.path / "series").write_text("\n".join(reversed(series.names()))),
    ):
        change()
        assert series.hash() not in seen
        seen.add(series.hash())
