"""`survey`: what is said of a vLLM that is another one."""

import pytest
from elastic_tools.patchset import survey, target
from elastic_tools.patchset.cli import main
from elastic_tools.patchset.survey import CHANGED, FITS, GONE, MOVED

from .conftest import UPSTREAM, replace, snapshot, write

POOL, WINDOWS, WORKER = "vllm/core/pool.py", "vllm/core/windows.py", "vllm/worker.py"


@pytest.fixture
def other(tmp_path):
    write(tmp_path / "other", UPSTREAM)
    return tmp_path / "other"


def looked(project, other):
    return survey.survey(project.series, target.find(other))


def outcomes(found):
    return [(hunk.patch[:4], hunk.path, hunk.outcome) for hunk in found.hunks]


def test_the_pinned_release_fits(project, other):
    found = looked(project, other)
    assert outcomes(found) == [
        ("0001", POOL, FITS),
        ("0002", POOL, FITS),
        ("0002", WINDOWS, FITS),
        ("0003", WORKER, FITS),
    ]
    assert (found.names, found.there) == ([], [])


def test_each_hunk_has_its_own_outcome(project, other):
    replace(other / POOL, "pool line 2\n", "pool line 2\nnew\nnew\n")
    replace(other / POOL, "pool line 50\n", "another line\n")
    replace(other / WINDOWS, "crlf line 6\r\ncrlf line 7\r\n", "crlf line 6\r\nbetween\r\ncrlf line 7\r\n")
    (other / WORKER).unlink()
    found = looked(project, other)
    assert [outcome for _, _, outcome in outcomes(found)] == [MOVED, CHANGED, CHANGED, GONE]
    first, second, third, _ = found.hunks
    assert first.offset == 2
    assert second.missing == ("`pool line 50` is nowhere",)
    assert third.missing == ("`crlf line 6` and `crlf line 7` are no neighbours",)


def test_nothing_is_written(project, other):
    replace(other / POOL, "pool line 50\n", "another line\n")
    before = snapshot(other)
    looked(project, other)
    assert snapshot(other) == before


def test_names_that_the_new_modules_miss(project, other):
    files = project.series.path / "files"
    write(other, {"vllm/core/__init__.py": "from .pool_api import *\nfrom math import *\n"})
    write(
        other, {"vllm/core/pool_api.py": "from vllm.core import *\nfrom vllm.core.lazy import *\n\ndef inner(): ...\n"}
    )
    write(other, {"vllm/core/lazy.py": 'import os as system\n\ndef there(): ...\n\nTABLE = {"Late": 1}\n'})
    write(
        files,
        {
            "vllm/core/extra.py": "from vllm.core.lazy import there, system, Late, TABLE, gone\n"
            "from vllm.core import inner, there as again, away\n"
            "from vllm.core.nowhere import thing\nfrom vllm.elastic.deep.arena import SIZE\nimport vllm.core.pool\n",
        },
    )
    found = looked(project, other)
    assert [(name.module, name.wanted) for name in found.names] == [
        ("vllm/core/extra.py", "vllm.core.away"),
        ("vllm/core/extra.py", "vllm.core.lazy.gone"),
        ("vllm/core/extra.py", "vllm.core.nowhere.thing"),
    ]


def test_new_files_that_are_there_already(project, other):
    write(other, {"vllm/core/extra.py": "theirs\n"})
    assert looked(project, other).there == ["vllm/core/extra.py"]


def test_the_document(project, other, tmp_path, capsys):
    replace(other / POOL, "pool line 50\n", "another | line\n")
    replace(other / "PKG-INFO", "9.9.1", "9.9.2")
    assert main(["survey", str(other), "-o", str(tmp_path / "list.md")], project.root) == 0
    text = (tmp_path / "list.md").read_text()
    assert "# The series for 9.9.1 on vLLM 9.9.2" in text
    assert "4 hunks: 3 fits, 0 moved, 1 does not fit, 0 file is gone." in text
    assert f"| 0002 | `{POOL}` | 48 | `pool line 46` | does not fit | `pool line 50` is nowhere |" in text
    assert main(["survey", str(other)], project.root) == 0
    assert capsys.readouterr().out == text


def test_a_directory_without_vllm(project, tmp_path, capsys):
    assert main(["survey", str(tmp_path)], project.root) == 1
    assert "has no vllm" in capsys.readouterr().err
