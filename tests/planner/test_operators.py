"""Operator times from tables that are small enough to work the answers out by hand."""

import numpy as np
import pytest
from elastic_tools.planner.cache import cache_dtype
from elastic_tools.planner.hardware import GPU
from elastic_tools.planner.operators import Operators, Source, _extend
from elastic_tools.planner.tables import Tables

# 1 TB/s, so that a floor of 0.92 of it is 0.92e9 bytes a ms: no table below comes near it.
DEVICE = GPU("test", 2**36, 1e12, {16: 1e14, 8: 2e14}, 1e11, 90, "none", "0", 1.0, 2048, 256)


def operators(**arrays):
    return Operators(DEVICE, Tables("test", "0", {name: np.array(value, float) for name, value in arrays.items()}))


def gemm():
    """Times [m, n, k]: 1 ms at the smallest shape; twice the tokens, outputs or inputs take 2, 3 or 5 times as long."""
    grid = [[[2**m * 3**n * 5**k for k in range(2)] for n in range(2)] for m in range(2)]
    axes = {"gemm/bfloat16/m": [64, 128], "gemm/bfloat16/n": [100, 200], "gemm/bfloat16/k": [1000, 2000]}
    return operators(**{"gemm/bfloat16": grid}, **axes)


@pytest.mark.parametrize(
    ("tokens", "n", "k", "ms", "source"),
    [
        (64, 100, 1000, 1.0, Source.MEASURED),
        (128, 200, 2000, 30.0, Source.MEASURED),
        (64 * 2**0.5, 100, 1000, 2**0.5, Source.INTERPOLATED),  # half way in logarithms
        (64, 100 * 2**0.5, 1000, 3**0.5, Source.INTERPOLATED),
        (64, 100, 1000 * 2**0.5, 5**0.5, Source.INTERPOLATED),
        (64, 100 * 2**0.5, 1000 * 2**0.5, 15**0.5, Source.INTERPOLATED),
        (256, 100, 1000, 4.0, Source.INTERPOLATED),  # beyond the tokens: in proportion
        (1, 100, 1000, 1.0, Source.INTERPOLATED),  # fewer tokens than were measured are no faster
        (64, 400, 1000, 6.0, Source.MODELLED),  # twice the outputs of the largest shape
    ],
)
def test_a_matrix_product(tokens, n, k, ms, source):
    timed = gemm().gemm(np.array([tokens], float), n, k, 16)
    assert timed.ms[0] == pytest.approx(ms)
    assert timed.source is source


def test_a_matrix_product_is_never_faster_than_its_weights_are_read():
    axes = {"gemm/bfloat16/m": [64], "gemm/bfloat16/n": [1000], "gemm/bfloat16/k": [1000]}
    timed = operators(**{"gemm/bfloat16": [[[1e-9]]]}, **axes).gemm(np.array([64.0]), 1000, 1000, 16)
    assert timed.ms[0] == pytest.approx(2e6 / 0.92e12 * 1e3)


def test_four_bit_weights_are_a_roofline():
    """100,000 tokens: 2 x 1e5 x 1e3 x 1e3 FLOP at 0.6 of 1e14 FLOP/s, and a launch of 2 us."""
    timed = gemm().gemm(np.array([1e5]), 1000, 1000, 4.15625)
    assert timed.ms[0] == pytest.approx(2e11 / 0.6e14 * 1e3 + 0.002)
    assert timed.source is Source.MODELLED


@pytest.mark.parametrize(
    ("elements", "tp", "ms", "source"),
    [
        (1000, 1, 0.0, Source.MEASURED),
        (1000, 2, 1.0, Source.INTERPOLATED),
        (10_000, 2, 3.0, Source.INTERPOLATED),
        (1000 * 10**0.5, 2, 3**0.5, Source.INTERPOLATED),
        (100_000, 4, 80.0, Source.INTERPOLATED),  # ten times the largest message
        (1000, 8, 4.0, Source.MODELLED),  # more GPUs than were measured: twice the largest group
    ],
)
def test_all_reduce(elements, tp, ms, source):
    made = operators(
        **{"allreduce": [[1, 3], [2, 8]], "allreduce/num_gpus": [2, 4], "allreduce/message_size": [1000, 10_000]}
    )
    timed = made.all_reduce(np.array([elements], float), tp)
    assert timed.ms[0] == pytest.approx(ms)
    assert timed.source is source


@pytest.mark.parametrize(
    ("length", "heads", "kv_heads", "ms", "source"),
    [
        (100, 8, 2, 1.0, Source.INTERPOLATED),
        (200, 8, 2, 3.0, Source.INTERPOLATED),
        (100 * 2**0.5, 8, 2, 3**0.5, Source.INTERPOLATED),
        (400, 8, 2, 12.0, Source.INTERPOLATED),  # beyond the table with the square of the length
        (100, 16, 2, 2.0, Source.INTERPOLATED),
        (100, 32, 2, 4.0, Source.MODELLED),  # more heads than were measured, in proportion
        (100_000, 8, 3, 2 * 1e10 * 8 * 64 / (0.45 * 1e14) * 1e3 + 0.01, Source.MODELLED),  # a roofline
    ],
)
def test_prefill_attention(length, heads, kv_heads, ms, source):
    made = operators(
        **{"context/64/bfloat16": [[[1, 3]], [[2, 6]]], "context/64/bfloat16/num_heads": [8, 16]},
        **{"context/64/bfloat16/num_key_value_heads": [2], "context/64/bfloat16/isl": [100, 200]},
    )
    timed = made.prefill(np.array([length], float), heads, kv_heads, 64)
    assert timed.ms[0] == pytest.approx(ms)
    assert timed.source is source


def test_what_did_not_fit_the_gpu_grows_with_the_requests():
    """Batches 1, 2, 4 at contexts 10, 100, 1000; large ones ran out of memory."""
    nan = np.nan
    plane = np.array([[1.0, 2.0, 10.0], [1.5, 4.0, nan], [2.0, nan, nan]])
    _extend(plane, np.array([1.0, 2.0, 4.0]), np.array([10.0, 100.0, 1000.0]))
    assert plane.tolist() == [[1.0, 2.0, 10.0], [1.5, 4.0, 20.0], [2.0, 8.0, 40.0]]
    only_short = np.array([[1.0, nan], [2.0, nan]])
    _extend(only_short, np.array([1.0, 2.0]), np.array([10.0, 100.0]))
    assert only_short.tolist() == [[1.0, 10.0], [2.0, 20.0]]


def decode():
    """Decode attention of one layer: 1 us for each request, whatever the context, and one for each 100 tokens of it."""
    batch, step = [1, 2, 4, 2048], [0, 99, 262_143]
    grid = [[[[(1 + (s + 1) / 100) * b / 1e3 for s in step] for b in batch]]]
    name = "decode/64/bfloat16"
    axes = {f"{name}/num_heads": [8], f"{name}/num_key_value_heads": [2], f"{name}/batch_size": batch}
    return operators(**{name: grid, f"{name}/step": step}, **axes)


def test_a_slow_format_costs_its_factor_of_what_grows_with_the_context():
    made = decode()
    plain, source = made.decode(cache_dtype("auto"), 8, 2, 64)
    assert source is Source.INTERPOLATED
    assert plain[0, 0] == pytest.approx(1.01e-3)
    slow, source = made.decode(cache_dtype("3bit"), 8, 2, 64)
    assert source is Source.MODELLED
    assert slow[:, 0] == pytest.approx(plain[:, 0])
    assert slow[3, 12] - slow[3, 0] == pytest.approx(8 * (plain[3, 12] - plain[3, 0]))


def test_a_free_format_costs_what_its_bytes_cost():
    """int4 at 64 elements: a key and a value take 64 + 8 bytes instead of 256."""
    made = decode()
    plain, free = (made.decode(cache_dtype(name), 8, 2, 64, ideal=True)[0] for name in ("auto", "int4"))
    assert free[3, 12] - free[3, 0] == pytest.approx(72 / 256 * (plain[3, 12] - plain[3, 0]))
