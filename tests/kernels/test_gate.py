"""The ahead-of-time gate: what it lets pass, what it says, and that it compiles."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from elastic_tools.kernels import table
from elastic_tools.kernels.cases import Case
from elastic_tools.kernels.inspecting import _SASS, Found, Instruction, _found, _gcn, _sass, loops_of
from elastic_tools.pins import ROOT

FOUND = Found(registers=128, spills=0, shared_bytes=38912, instructions=900, loop=400, scan=0)
GUARD = Found(registers=32, spills=0, shared_bytes=16, instructions=260, loop=0, scan=48)
ROW = table.Row("sm_80", Case(decode=True), FOUND, GUARD, FOUND, None, tile=64)


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


def test_the_guard_must_not_spill_either():
    assert replace(ROW, guard=replace(GUARD, spills=3)).faults == ["3 spills"]


def test_the_table_names_what_does_not_pass(monkeypatch):
    passing = table.markdown([ROW], "command")
    assert "The gate passes: no spills, and" in passing
    assert "| sm_80 | decode D128 block 16 group 4 bf16 | 128 | 0 | 38912 | 64 | 400 | 48 | +0.4% |" in passing
    failing = table.markdown([ROW, row(spills=5)], "command")
    assert "The gate does not pass in 1 of them" in failing
    assert "- sm_80 decode D128 block 16 group 4 bf16: 5 spills\n" in failing


SASS = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        /*0010*/              @!P0 EXIT ;
        /*0020*/                   LDG.E R4, [R2.64] ;
        /*0030*/                   LDG.E.U8 R5, [R4.64] ;
        /*0040*/               @P1 BRA 0x20 ;
        /*0050*/                   SYNCS.PHASECHK P2, [UR4] ;
        /*0060*/              @!P2 BRA 0xd0 ;
        /*0070*/                   HMMA.16816.F32.BF16 R8, R4, R6, R8 ;
        /*0080*/                   BRA.U UP0, 0xa0 ;
        /*0090*/                   LDGSTS.E [R6], [R2.64] ;
        /*00a0*/              @!P3 CALL.REL.NOINC 0xc0 ;
        /*00b0*/                   BRA 0x50 ;
        /*00c0*/                   EXIT ;
        /*00d0*/                   SYNCS.PHASECHK P2, [UR4] ;
        /*00e0*/              @!P2 BRA 0xd0 ;
        /*00f0*/                   BRA 0x70 ;
        /*0100*/                   BRA 0x100 ;
"""


def test_loops_of_a_program_for_nvidia():
    """The loop with the product waits for a barrier behind the end of the program, and is left by a call. The scan
    is a loop ahead of it. What follows the end is never reached.
    """
    code = _sass(SASS)
    assert [(one.target, one.goes_on) for one in code[:6]] == [(None, True)] * 4 + [(2, True), (None, True)]
    assert (code[11].target, code[11].goes_on) == (5, False)
    assert not code[12].goes_on
    assert sorted(map(sorted, loops_of(code))) == [[2, 3, 4], [*range(5, 12), 13, 14, 15], [13, 14]]
    found = _found(100, 0, 1024, code, _SASS)
    assert (found.loop, found.scan, found.instructions) == (10, 3, 17)
    assert found.mix == {"matrix": 1, "global": 1, "control": 8}


GCN = """
f:
	s_branch .LBB0_2
.LBB0_1:
	v_mfma_f32_32x32x8_bf16_1k a[0:15], v[0:1], v[2:3], a[0:15]
	s_cbranch_scc1 .LBB0_3
.LBB0_2:
	global_load_dword v0, v[2:3], off
	s_branch .LBB0_1
.LBB0_3:
	s_endpgm
"""


def test_loops_of_a_program_for_amd():
    """The head of a loop may lie behind what goes back to it."""
    assert loops_of(_gcn(GCN)) == [{1, 2, 3, 4}]


def test_the_loop_is_that_of_the_innermost_matrix_product():
    """Of nested loops, the inner one."""
    code = [Instruction("IADD"), Instruction("HMMA"), Instruction("FADD"), Instruction("BRA", 1)]
    code += [Instruction("BRA", 0), Instruction("EXIT")]
    found = _found(100, 0, 1024, code, _SASS)
    assert (found.loop, found.scan) == (3, 0)
    assert found.mix == {"matrix": 1, "float": 1, "control": 1}


@pytest.mark.parametrize(
    "byte", ["LDG.E.U8.CONSTANT R1", "@P1 LDG.E.U8 R28, desc[UR14][R16.64]", "global_load_ubyte v1"]
)
def test_a_scan_that_was_unrolled_counts_for_one_entry(byte):
    code = [Instruction("IADD"), *[Instruction("LDG.E R1"), Instruction(byte)] * 4, *[Instruction("IADD")] * 3]
    found = _found(100, 0, 1024, [*code, Instruction("BRA", 1), Instruction("EXIT")], _SASS)
    assert (found.loop, found.scan) == (0, 3)


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
    assert compiled["guard"]["scan"] > 0
    assert compiled["ours"] == compiled["unguarded"], "the attention kernel is the same with the guard and without"
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
