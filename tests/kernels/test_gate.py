"""The ahead-of-time gate: what it lets pass, what it says, and that it compiles."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from elastic_tools.kernels import exceptions, table
from elastic_tools.kernels.cases import Case
from elastic_tools.kernels.exceptions import Exemption
from elastic_tools.kernels.inspecting import Found, _found
from elastic_tools.pins import ROOT

FOUND = Found(registers=128, spills=0, shared_bytes=38912, instructions=900, loop=400, scan=48)
ROW = table.Row("sm_80", Case(decode=True), FOUND, replace(FOUND, scan=0), None, tile=64)


def row(**figures):
    return replace(ROW, ours=replace(FOUND, **figures))


def test_the_guard_costs_its_part_of_a_scan():
    """A scan looks at 128 entries, and a tile of 64 positions has 4 of 16 positions each."""
    assert ROW.guard_cost == pytest.approx(48 * 4 / 128 / 400)
    assert row(loop=410).guard_cost == pytest.approx((410 + 1.5) / 400 - 1)


@pytest.mark.parametrize(
    ("figures", "faults"),
    [
        ({}, []),
        ({"loop": 410}, []),
        ({"loop": 412}, ["the guard costs 3.4%"]),
        ({"spills": 1}, ["1 spills"]),
        ({"shared_bytes": 166_913}, ["166913 bytes of shared memory"]),
        ({"spills": 2, "loop": 440}, ["2 spills", "the guard costs 10.4%"]),
        ({"parked": 30}, []),
    ],
)
def test_bars(figures, faults):
    assert row(**figures).faults == faults
    assert not row(**figures).exceptions


def test_an_exception_is_for_one_figure_of_one_configuration_up_to_a_limit(monkeypatch):
    monkeypatch.setattr(
        exceptions, "EXEMPTIONS", (Exemption("sm_80", str(ROW.case), "spills", 3, "outside of the loop"),)
    )
    assert row(spills=3).faults == []
    assert row(spills=3).exceptions == ["3 spills: outside of the loop"]
    assert row(spills=4).faults == ["4 spills"]
    assert row(spills=3, loop=420).faults == ["the guard costs 5.4%"]
    assert replace(row(spills=3), target="sm_90").faults == ["3 spills"]
    assert replace(row(spills=3), case=Case(decode=True, feature="window")).faults == ["3 spills"]
    assert row().faults == ["needs no exception for spills any more (0 spills)"]


def test_the_table_names_what_does_not_pass(monkeypatch):
    passing = table.markdown([ROW], "command")
    assert "The gate passes: 0 faults, 0 named exceptions" in passing
    assert "| sm_80 | decode D128 block 16 group 4 bf16 | 128 | 0 | 38912 | 64 | 400 | 48 | +0.4% |" in passing
    failing = table.markdown([ROW, row(spills=5)], "command")
    assert "The gate does not pass: 1 faults" in failing
    assert "- sm_80 decode D128 block 16 group 4 bf16: 5 spills\n" in failing


def test_every_exception_is_for_a_configuration_that_exists():
    from elastic_tools.kernels.cases import cases
    from elastic_tools.kernels.compiling import TARGETS

    names = {str(case) for case in cases()}
    for exempt in exceptions.EXEMPTIONS:
        assert exempt.target in TARGETS
        assert exempt.case in names
        assert exempt.limit > table.BARS[exempt.figure]


def test_the_loop_is_that_of_the_smallest_matrix_product():
    """Of nested loops, the inner one; the scan is a loop that reads and multiplies nothing."""
    kinds = {"matrix": "MMA", "global": "LDG", "float": "FADD"}
    inner = ["HMMA"] * 8 + ["LDG"] * 4 + ["FADD"] * 8 + ["IADD"] * 20
    scan = ["LDG"] + ["IADD"] * 19
    code = [*scan, *inner, "EXIT"]
    found = _found(100, 0, 1024, code, [scan, [*scan, *inner], inner, ["BAR"] * 3], kinds)
    assert (found.loop, found.scan, found.instructions) == (40, 20, 61)
    assert found.mix == {"matrix": 8, "global": 4, "float": 8, "integer": 20}


def test_compiles_and_judges(tmp_path):
    """One configuration for one target, as the command does it."""
    command = [sys.executable, "-m", "elastic_tools.kernels", "--targets", "sm_90", "--output", tmp_path]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "scripts")}
    finished = subprocess.run(
        [*command, "--only", "decode D64 "], env=environment, capture_output=True, text=True, timeout=300
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    (compiled,) = json.loads((tmp_path / "kernels.json").read_text())
    assert 16 <= compiled["ours"]["registers"] <= 255
    assert compiled["ours"]["mix"]["matrix"] > 0
    assert compiled["ours"]["scan"] > 0 == compiled["unguarded"]["scan"]
    assert compiled["upstream"]["loop"] > 0
    assert "The gate passes" in (tmp_path / "kernels.md").read_text()


def test_fails_where_a_bar_is_not_met(monkeypatch, tmp_path, capsys):
    from concurrent.futures import ThreadPoolExecutor

    from elastic_tools.kernels import __main__ as command

    monkeypatch.setattr(command, "ProcessPoolExecutor", lambda count, _: ThreadPoolExecutor(count))
    monkeypatch.setattr(sys, "argv", ["kernels", "--targets", "sm_80", "--output", str(tmp_path)])
    monkeypatch.setattr(command, "rows_for", lambda target, only: [row(spills=7)])
    assert command.main() == 1
    assert "sm_80 decode D128 block 16 group 4 bf16: 7 spills" in capsys.readouterr().err
    monkeypatch.setattr(command, "rows_for", lambda target, only: [ROW])
    assert command.main() == 0
