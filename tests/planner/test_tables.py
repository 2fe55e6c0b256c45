"""The reader of measured tables, on Parquet files that are written here."""

import multiprocessing

import numpy as np
import pyarrow
import pytest
from elastic_tools.planner import tables
from elastic_tools.planner.hardware import GPU
from pyarrow import parquet

DEVICE = GPU("test", 2**36, 1e12, {16: 1e14, 8: 2e14}, 1e11, 90, "card", "1.2", 1.0, 2048, 256)


def write(folder, family, version, name, rows):
    path = folder / "data" / "card" / family / "vllm" / version
    path.mkdir(parents=True)
    parquet.write_table(pyarrow.Table.from_pylist(rows), path / f"{name}.parquet")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A package with one small table of each kind."""
    product = {"gemm_dtype": "bfloat16", "n": 32, "k": 64}
    sizes = [{"m": 1, "latency": 1.0}, {"m": 1, "latency": 0.5}, {"m": 4, "latency": 2.0}]
    # another width has two tokens, which this one lacks: a hole in the grid
    rows = [product | size for size in sizes] + [product | {"n": 48, "m": m, "latency": 3.0} for m in (1, 2, 4)]
    write(tmp_path, "gemm", "1.2", "gemm_perf", rows)
    head = {"num_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "kv_cache_dtype": "bfloat16", "window_size": 0}
    write(
        tmp_path,
        "attention",
        "1.2",
        "context_attention_perf",
        [
            head | {"isl": 128, "batch_size": 1, "latency": 7.0},
            head | {"isl": 128, "batch_size": 2, "latency": 70.0},
            head | {"isl": 256, "batch_size": 1, "latency": 9.0},
            head | {"isl": 256, "batch_size": 1, "latency": 1.0, "window_size": 128},
        ],
    )
    generation = [head | {"step": step, "batch_size": 1, "latency": 3.0 + step} for step in (1, 3)]
    parquet.write_table(
        pyarrow.Table.from_pylist(generation),
        tmp_path / "data/card/attention/vllm/1.2/generation_attention_perf.parquet",
    )
    reduced = {"num_gpus": 2, "message_size": 1024}
    write(tmp_path, "comm", "1.9", "custom_allreduce_perf", [reduced | {"backend": "vllm_graph", "latency": 9.0}])
    several = [
        reduced | {"backend": "vllm_graph", "latency": 0.5},
        reduced | {"backend": "nccl", "latency": 0.1},
    ]
    write(tmp_path, "comm", "1.10", "custom_allreduce_perf", several)
    expert = {"hidden_size": 16, "inter_size": 8, "topk": 2, "num_experts": 4, "moe_tp_size": 1, "num_tokens": 1}
    kept = {"moe_ep_size": 1, "distribution": tables.SKEW, "moe_dtype": "bfloat16", "latency": 4.0}
    write(
        tmp_path,
        "moe",
        "1.2",
        "moe_perf",
        [expert | kept, expert | kept | {"moe_ep_size": 2}, expert | kept | {"distribution": "uniform"}],
    )
    monkeypatch.setattr(tables, "data_folder", lambda: tmp_path)
    return tmp_path


def read(path):
    with np.load(path) as file:
        return {name: file[name] for name in file.files}


def test_what_is_read(folder):
    path = folder / "cache" / "card.npz"
    tables.build(DEVICE, path)
    found = read(path)
    assert found["gemm/bfloat16/m"].tolist() == [1, 2, 4]
    # of two kernels the faster one; and at two tokens, half way in logarithms, the mean of 0.5 and 2 in logarithms
    assert found["gemm/bfloat16"][:, 0, 0] == pytest.approx([0.5, 1.0, 2.0])
    assert found["context/64/bfloat16"].tolist() == [[[7.0, 9.0]]]  # one sequence, full attention
    assert found["decode/64/bfloat16"].tolist() == [[[[4.0, 6.0]]]]
    assert found["allreduce"].tolist() == [[0.5]]  # version 1.10 is newer than 1.9
    assert found["moe/bfloat16"].tolist() == [[16, 8, 2, 4, 1, 1, 4.0]]
    assert [each.name for each in path.parent.iterdir()] == ["card.npz"]


def build_beside(path, barrier):
    """Builds the file, and goes on only when the other process has written its own, too."""
    write_file = np.savez_compressed

    def and_wait(*args, **kwargs):
        write_file(*args, **kwargs)
        barrier.wait(timeout=60)

    tables.np.savez_compressed = and_wait
    tables.build(DEVICE, path)


def test_processes_that_start_together_build_it_both(folder):
    context = multiprocessing.get_context("fork")
    path, barrier = folder / "cache" / "card.npz", context.Barrier(2)
    both = [context.Process(target=build_beside, args=(path, barrier)) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join()
    assert [process.exitcode for process in both] == [0, 0]
    assert read(path)["gemm/bfloat16/m"].tolist() == [1, 2, 4]
