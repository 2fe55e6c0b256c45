"""The benchmark of resizes measures what it names, and its report says what was found."""

import asyncio
import json

import pytest
from elastic_tools.bench import pages
from elastic_tools.bench.resize import report
from elastic_tools.bench.resize.cases import FULL, KINDS, QUICK, Case, Sample, Settings, order
from elastic_tools.bench.resize.copies import copy_ms_per_mib
from elastic_tools.bench.resize.load import Decoders, LoadError
from elastic_tools.bench.resize.measure import Measured, _measure
from storm.fake import FakeServer

MIB = 2**20


def sample(what, mib, moved=0, pause=10.0, to=None, outcome="done"):
    before, after = mib + 100, 100
    answer = {"outcome": outcome, "from": before, "to": after if to is None else to, "wanted": after}
    answer |= {"evicted": 0, "moved": moved, "preempted": 0, "duration_ms": 2 * pause, "pause_ms": pause}
    return Sample(what, mib, answer, quiet_gaps_ms=[10.0] * 99 + [20.0], gaps_ms=[50.0, 100.0])


def measured(*samples):
    times = {f"{name}_ms": float(number) for number, name in enumerate(pages.TIMES)}
    memory = times | {"mib": 64, "rounds": 9, "memset_per_attach": 20.0, "memset_per_detach": 30.0}
    calls = {"attach": {"create": 30, "map": 31}}
    return Measured("a model", MIB, 4, MIB // 32, 0.5, {"vllm": "1"}, list(samples), [memory], calls)


@pytest.mark.parametrize("settings", [FULL, QUICK])
def test_every_kind_is_measured_and_repeats_lie_apart(settings):
    planned = order(settings)
    assert {case.kind for case in planned} == set(KINDS)
    assert all(planned.count(case) == case.repeats for case in settings.cases)
    first = planned[: len(settings.cases)]
    assert first == list(settings.cases)


def test_every_second_round_goes_backwards():
    cases = (Case("free", 64, 2), Case("cached", 64, 2))
    assert order(Settings(cases)) == [*cases, *cases[::-1]]


def test_what_was_done_is_told_where_the_resize_was_partial():
    assert sample("moves", 64).done_mib == 64
    assert sample("moves", 64, to=132, outcome="partial").done_mib == 32
    assert sample("moves", 64, to=164, outcome="refused").done_mib == 0


def test_a_move_costs_what_the_pause_has_beyond_that_of_free_chunks():
    # 64 MiB of free chunks pause for 10 ms; 16 moved blocks of 1 MiB add 8 ms, 0.5 ms each.
    text = report.moves(measured(sample("free", 64), sample("moves", 64, moved=16, pause=18.0)))
    assert "A move takes 0.500 ms of pause per MiB moved" in text
    assert "costs 1.0 times that" in text


def test_no_move_is_said_and_not_divided_by():
    assert "No resize moved a block" in report.moves(measured(sample("free", 64), sample("moves", 64)))


def test_the_gaps_of_a_window_are_those_that_reach_into_it():
    decoders = Decoders(None, "a model", gaps=[(1.0, 0.1), (2.5, 1.2), (3.0, 0.2), (9.0, 0.3)])
    assert decoders.gaps_ms(2.0, 3.0) == pytest.approx([1200, 200])


def test_the_report_says_what_was_found(tmp_path):
    machine = dict.fromkeys(["date", "command", "commit", "cpu", "cores", "memory_gib", "kernel", "python"], "this")
    found = measured(
        sample("grow", 64), sample("free", 64), sample("free", 64, pause=30.0), sample("moves", 64, moved=4)
    )
    written = report.write(QUICK, machine, found, tmp_path)
    assert [path.name for path in written] == ["resize.md", "resize.json", "resize.png"]
    page = written[0].read_text()
    assert "| shrink, all free | 64 | 2 | done | 64.0 (64.0 to 64.0) | 0, 0 | 0 | 40.0 (20.0 to 60.0) |" in page
    assert "| all |  | 10 | 10 | 20 | 75 | 100 | 100 |" in page
    assert "| 64 | 1.00 ms | 2.00 ms | 3.00 ms | 4.00 ms | 5.00 ms | 6.00 ms | 7.00 ms | 20x | 30x |" in page
    assert "| attach | 30 | 31 | 0 | 0 | 0 |" in page
    assert json.loads(written[1].read_text())["measured"]["samples"][3]["answer"]["moved"] == 4
    assert written[2].read_bytes().startswith(b"\x89PNG")


def test_copies_take_time():
    assert 0.001 < copy_ms_per_mib(48 << 10) < 1000


def test_it_runs_against_a_server(monkeypatch):
    monkeypatch.setattr("elastic_tools.bench.resize.measure.WARM_UP_S", 0.2)
    monkeypatch.setattr("elastic_tools.bench.resize.measure.copy_ms_per_mib", lambda row_bytes: 0.5)
    settings = Settings((Case("free", 1, 2), Case("cached", 1, 1)), decoders=2, floor_mib=1, quiet_s=0.3)

    async def run(fault=None):
        async with FakeServer(fault, block_bytes=MIB // 8).running() as url:
            return await _measure(url, settings, layers=2)

    found = asyncio.run(run())
    assert [one.what for one in found.samples] == ["grow", "free", "grow", "cached", "grow", "free"]
    assert all(one.quiet_gaps_ms for one in found.samples)
    assert (found.block_bytes, found.row_bytes) == (MIB // 8, MIB // 16)
    with pytest.raises(LoadError):
        asyncio.run(run("the stream breaks off"))
