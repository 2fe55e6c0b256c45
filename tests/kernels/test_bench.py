"""The benchmark of the kernels: its arithmetic on a CPU, and itself on a GPU."""

import json
import os
import subprocess
import sys

import pytest
import torch
from elastic_tools.kernels.bench import OURS, Point, Result, grid, interleaved, main, table, write
from elastic_tools.pins import ROOT


@pytest.mark.parametrize(
    ("cache", "row"), [("bf16", 256), ("fp8_e4m3", 128), ("int8", 132), ("int4", 68)], ids=lambda x: str(x)
)
def test_bytes_of_a_call(cache, row):
    """Keys and values of every position, a table of 63 blocks for each sequence, and queries and outputs in bf16."""
    point = Point(batch=2, context=1000, q_heads=32, kv_heads=8, cache=cache)
    assert point.cache_bytes == 2 * 2 * 1000 * 8 * row
    assert point.call_bytes == point.cache_bytes + 2 * 63 * 4 + 2 * (2 * 32 * 128 * 2)


def test_rows_are_as_long_as_in_the_cache():
    from elastic_tools.kernels.bench import CACHES
    from elastic_tools.kernels.cases import ELEMENTS
    from vllm.v1.elastic_kv.kernels.formats import row_bytes

    for name in CACHES:
        format, element = ELEMENTS[name]
        assert Point(1, 1, 1, 1, name).cache_bytes == 2 * row_bytes(format, 128, element)


def test_the_grid():
    whole, quick = grid(False), grid(True)
    assert len(whole) == len(set(whole)) == 3 * 3 * 3 * 4
    assert set(quick) < set(whole)
    assert max(point.batch * point.context for point in quick) <= 8192
    assert {point.cache for point in quick} == {point.cache for point in whole}


def test_arms_take_turns():
    calls = []

    def arm(name, seconds):
        def call():
            calls.append(name)
            return seconds

        return call

    seconds = interleaved({name: arm(name, number) for number, name in enumerate("abc")}, 4)
    assert "".join(calls) == "abc" + "bca" + "cab" + "abc"
    assert seconds == {"a": [0] * 4, "b": [1] * 4, "c": [2] * 4}


RESULT = Result(
    Point(1, 1000, 32, 8, "bf16"),
    {OURS: [10e-6, 30e-6, 20e-6], "TRITON_ATTN": [20e-6, 45e-6, 80e-6]},
    {"FlashInfer": "ModuleNotFoundError: No module named 'flashinfer'"},
    bandwidth=1e12,
)


def test_medians_and_ratios():
    """The ratio is the median of the rounds' ratios, and not the ratio of the medians."""
    assert RESULT.times("TRITON_ATTN") == 2.0
    assert RESULT.times("FlashInfer") is None
    assert RESULT.share == pytest.approx(RESULT.point.call_bytes / 1e12 / 20e-6)


def test_the_report(tmp_path):
    line = table([RESULT]).splitlines()[-1]
    assert line == "| 1 x 1000, 32/8 heads, bf16 | 4.1 | 20.0 | 21% | - | 2.00 |"
    write([RESULT], "a device", tmp_path)
    text = (tmp_path / "kernel-bench.md").read_text()
    assert "On a device, a bandwidth of 1000 GB/s for copies." in text
    assert "FlashInfer: ModuleNotFoundError" in text
    assert json.loads((tmp_path / "kernel-bench.json").read_text())["results"][0]["seconds"] == RESULT.seconds


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_skips_without_a_gpu(tmp_path, capsys):
    assert main(["--quick", "--output", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("skipped: torch finds no CUDA device")
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
def test_on_a_gpu(tmp_path):
    """Every kernel computes the same, or this fails; how fast they are is not judged."""
    command = [sys.executable, "-m", "elastic_tools.kernels", "bench", "--quick", "--rounds", "5"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "scripts")}
    finished = subprocess.run(
        [*command, "--output", tmp_path], env=environment, capture_output=True, text=True, timeout=1200
    )
    assert finished.returncode == 0, finished.stderr
    results = json.loads((tmp_path / "kernel-bench.json").read_text())["results"]
    assert len(results) == len(grid(True))
    assert all(result["seconds"][OURS] for result in results)
