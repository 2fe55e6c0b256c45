"""The counts of the table are those that the stand-in driver counts."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from arena.arenas import make_arena
from arena.drivers import mappings, needs_stand_in
from elastic_tools.bench import driver as bench
from elastic_tools.bench.report import RESULTS
from support.cuda_stand_in import cuda_stand_in as device
from vllm.v1.elastic_kv import worker_side
from vllm.v1.elastic_kv.call_costs import PUBLISHED, CallCosts, best_run_bytes, costs_of, save_costs

PAGE = 4096
GIB = 1 << 30


@pytest.mark.parametrize(("chunks", "run_chunks"), [(64, 1), (64, 16), (64, 64), (63, 16)])
def test_counts(chunks, run_chunks):
    """A page of the stand-in stands for one of 2 MiB: 64 chunks over 32 segments are 4 GiB.

    The range has room for one more, or all segments would be one range.
    """
    needs_stand_in()
    device.reset()
    arena = make_arena(device.StandInDriver(), [PAGE] * 32, 1, 65, run_chunks=run_chunks)
    device.reset()
    arena.attach(range(chunks))
    names = ("cuMemCreate", "cuMemMap", "cuMemSetAccess")
    counted = [device.calls(name) for name in names]
    arena.detach(range(chunks))
    counted.append(device.calls("cuMemUnmap"))
    calls = bench.calls_of(32, -(-chunks // run_chunks))
    assert counted == [calls.create, calls.map, calls.set_access, calls.unmap]
    arena.close()


def test_4_gib_over_32_segments():
    pages, runs, whole = bench.rows(PUBLISHED, 4 * GIB, 32, 256 << 20)
    assert whole["way"].startswith("default: ")
    assert (pages["handles"], runs["handles"], whole["handles"]) == (2048, 16 * 32, 32)
    assert (pages["cut_mib"], runs["cut_mib"], whole["cut_mib"]) == (0, 8, 128)
    assert (pages["attach_calls"], whole["attach_calls"]) == (4128, 96)
    assert pages["attach_ms"] == pytest.approx((2048 * (193.32 + 1.45) + 32 * 35.99) / 1000, abs=0.1)
    assert whole["attach_ms"] == pytest.approx((32 * (193.32 + 1.45) + 32 * 35.99) / 1000, abs=0.1)
    by_the_byte = [row["attach_ms_if_create_costs_by_the_byte"] for row in (pages, whole)]
    assert by_the_byte[0] == pages["attach_ms"]
    assert by_the_byte[1] == pytest.approx((2048 * 193.32 + 32 * (1.45 + 35.99)) / 1000, abs=0.1)


def test_at_most_three_calls_for_each_segment_and_attach():
    """By default, and whatever the size is: the engine attaches run by run."""
    assert bench.rows(PUBLISHED, 4 * GIB, 32, 256 << 20)[-1]["attach_calls"] == 3 * 32
    sizes = [line.strip("| ").split(" | ") for line in bench.by_size(PUBLISHED, 32, 256 << 20).splitlines()[2:]]
    assert [row[0] for row in sizes] == ["1 GiB", "4 GiB", "16 GiB", "64 GiB"]
    assert {row[2] for row in sizes} == {"96"}
    assert sizes[1][3] == "96"


def test_what_is_assumed_is_marked():
    lines = dict(line.strip("| ").split(" | ", 1) for line in bench.figures(PUBLISHED).splitlines()[2:])
    assert {name for name, rest in lines.items() if "**assumed**" in rest} == {"release", "copy"}
    assert all("published | kvcached, benchmarks/bench_vmm" in lines[name] for name in ("create", "map", "set_access"))
    measured = CallCosts(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, "measured on cuda:0")
    assert bench.figures(measured).count("| measured | measured on cuda:0 |") == 6
    assert "No GPU was there" not in bench.report(
        measured, bench.rows(measured, GIB, 32, 256 << 20), 1024, 32, 256 << 20
    )


def test_the_best_run():
    """It is the one for which calls and copies cost the same, and the least in all."""
    best = best_run_bytes(PUBLISHED, 32, GIB, 1 << 60)

    def cost(run: float) -> float:
        calls = GIB / run * 32 * (PUBLISHED.create + PUBLISHED.map + PUBLISHED.unmap) / 1e6
        return calls + run / 2 / (PUBLISHED.copy_gib_per_s * GIB)

    assert cost(best) < min(cost(best * 1.1), cost(best / 1.1))
    assert best_run_bytes(PUBLISHED, 32, GIB, 256 << 20) == 256 << 20


def test_the_command_writes_what_it_prints(tmp_path, capsys, monkeypatch):
    def none():
        raise ValueError("no driver")

    monkeypatch.setattr(bench, "CudaPageDriver", none)
    assert bench.main(["--output", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert "as published" in printed.err
    text = (tmp_path / "driver-calls.md").read_text()
    assert printed.out.strip() in text
    assert "no time here was measured" in text
    assert json.loads((tmp_path / "driver-calls.json").read_text())["costs"]["create"] == PUBLISHED.create


def test_what_is_committed_is_what_the_command_writes(tmp_path, monkeypatch):
    """Byte for byte, as long as nobody measured a card."""

    def none():
        raise ValueError("no driver")

    monkeypatch.setattr(bench, "CudaPageDriver", none)
    assert bench.main(["--output", str(tmp_path)]) == 0
    committed = {path.name: path.read_text() for path in RESULTS.glob("driver-calls.*")}
    if "measured" in json.loads(committed["driver-calls.json"])["costs"]["source"]:
        pytest.skip("it was measured on a card")
    assert committed == {path.name: path.read_text() for path in tmp_path.iterdir()}


def test_access_is_timed_where_there_was_none(monkeypatch):
    """To allow what is allowed already may cost a driver nothing."""
    needs_stand_in()
    device.reset()
    driver = device.StandInDriver()
    allowed, real = [], driver.make_usable

    def noting(handles):
        (handle,) = handles
        place = driver._ledger.place(handle)
        allowed.append([permissions for _, _, permissions in mappings(place, PAGE)])
        real([handle])

    monkeypatch.setattr(driver, "make_usable", noting)
    bench.measure(driver, nbytes=1 << 20, repeats=3)
    assert allowed == [["---s"]] * (2 * 3 + 2)


def test_measuring_leaves_nothing():
    needs_stand_in()
    device.reset()
    before = device.left()
    driver = device.StandInDriver()
    costs = bench.measure(driver, nbytes=1 << 20, repeats=3)
    assert min(costs.create, costs.map, costs.set_access, costs.unmap, costs.copy_gib_per_s) > 0
    assert costs.source.startswith("measured on Stand-In 1000, driver ")
    assert device.left() == before


class TestTheTableOfACard:
    """An engine takes what was measured on its card, without being told."""

    MEASURED = replace(PUBLISHED, create=7.5, source="measured", assumed={})

    def test_it_is_found_by_the_name_of_the_card(self, tmp_path):
        table = save_costs(self.MEASURED, "NVIDIA H100 80GB HBM3", tmp_path)
        assert table == tmp_path / "elastic_kv" / "driver-calls-nvidia-h100-80gb-hbm3.json"
        assert costs_of("NVIDIA H100 80GB HBM3", tmp_path) == self.MEASURED
        assert costs_of("NVIDIA A100", tmp_path) is PUBLISHED

    @pytest.mark.parametrize("text", ["", "{}", "[]", '{"costs": {"create": 1}}', "nonsense"])
    def test_one_that_cannot_be_read_is_passed_over(self, tmp_path, text, caplog):
        table = save_costs(self.MEASURED, "card", tmp_path)
        table.write_text(text)
        assert costs_of("card", tmp_path) is PUBLISHED
        assert str(table) in caplog.text

    @pytest.mark.parametrize("value", [0, -1.0, math.inf, math.nan, "1"])
    def test_a_cost_is_a_positive_number(self, value):
        with pytest.raises(ValueError, match="create"):
            replace(PUBLISHED, create=value)

    def test_the_worker_tells_it(self, tmp_path, monkeypatch):
        needs_stand_in()
        monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
        worker = SimpleNamespace(device=torch.device("cpu"))
        assert worker_side.probe(worker, "host")["costs"] is None
        monkeypatch.setattr(worker_side, "make_driver", lambda *_: device.StandInDriver())
        assert worker_side.probe(worker, "cuda")["costs"] == PUBLISHED
        save_costs(self.MEASURED, "Stand-In 1000", tmp_path)
        assert worker_side.probe(worker, "cuda")["costs"] == self.MEASURED
