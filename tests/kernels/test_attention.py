"""The attention and store kernels against the reference."""

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from vllm.v1.elastic_kv.kernels.launch import Features

from kernels.caches import FORMATS, Batch, Cache

DTYPES = [torch.float32, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("group", [1, 3, 4], ids=["MHA", "GQA of 3", "GQA of 4"])
def test_decode(dtype, splits, group):
    Batch(Cache(dtype=dtype), [1, 16, 70], [1, 1, 1], group).check(splits)


def test_multi_query():
    Batch(Cache(heads=1), [33, 5], [1, 1], group=8).check(splits=2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", [1, 3, 8], ids=["MHA", "GQA of 3", "GQA of 8"])
def test_prefill_and_mixed(dtype, group):
    """Whole prompts, the end of one, and a decode, in one batch."""
    Batch(Cache(dtype=dtype, heads=1), [20, 37, 18], [20, 9, 1], group).check()


@pytest.mark.parametrize("head_size", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("new", [[1, 1], [3, 17]], ids=["decode", "prefill"])
def test_head_sizes(head_size, new):
    Batch(Cache(heads=1, head_size=head_size, dtype=torch.float16), [19, 17], new).check(splits=2)


@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256])
def test_block_sizes(block_size):
    """On and off block boundaries, and those of tiles and splits."""
    cache = Cache(block_size=block_size, heads=1, blocks=14, head_size=16)
    batch = Batch(cache, [block_size - 1, block_size, block_size + 1], [1, 1, 1])
    batch.check(splits=2)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("new", [[1, 1], [4, 20]], ids=["decode", "prefill"])
@pytest.mark.parametrize("head_size", [64, 80])
def test_formats(name, new, head_size):
    cache = Cache(name=name, heads=1, head_size=head_size, dtype=torch.float16)
    Batch(cache, [35, 20], new).check(splits=2)


@pytest.mark.parametrize("name", FORMATS)
def test_formats_in_float32(name):
    """What is read from the cache is exact, so the bound is that of float32."""
    Batch(Cache(name=name), [35, 20], [1, 1]).check()


FEATURES = {
    "window": Features(window=7),
    "window of one": Features(window=1),
    "window wider than the sequence": Features(window=500),
    "soft cap": Features(soft_cap=2.0),
    "sinks": Features(sinks=torch.tensor([0.5, -1.0, 3.0, 0.0])),
    "ALiBi": Features(slopes=torch.tensor([0.5, 0.25, 0.125, 0.0625])),
    "all": Features(17, 5.0, torch.tensor([0.5, -1.0, 3.0, 0.0]), torch.tensor([0.5, 0.25, 0.125, 0.0625])),
}


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize(
    ("new", "splits"), [([1, 1], 1), ([1, 1], 4), ([9, 30], 1)], ids=["decode", "splits", "prefill"]
)
def test_features(name, new, splits):
    Batch(Cache(heads=1), [70, 33], new, group=4).check(splits, FEATURES[name])


@pytest.mark.parametrize("name", ["int8", "int4", "fp8_e4m3"])
def test_features_in_quantised_caches(name):
    Batch(Cache(name=name, heads=1), [40, 33], [1, 1], group=4).check(2, FEATURES["all"])


@pytest.mark.parametrize("features", [Features(), Features(sinks=torch.zeros(4))], ids=["plain", "sinks"])
@pytest.mark.parametrize("splits", [1, 4])
def test_empty_sequence(splits, features):
    """A row of a padded batch: it has a query, and no position. Zero, and not NaN."""
    batch = Batch(Cache(), [0, 21], [1, 1])
    batch.check(splits, features)
    assert not batch.run(splits, features)[0].any()


def test_sequence_without_a_query():
    """Padding of a captured graph: no token of its own."""
    Batch(Cache(), [21, 0, 0], [1, 0, 0]).check(splits=2)
    Batch(Cache(), [21, 0, 9], [5, 0, 2]).check()


# Shrinking an example takes minutes in the interpreter.
@settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
@given(data=st.data())
def test_any_shape(data):
    name = data.draw(st.sampled_from(list(FORMATS)), label="format")
    lengths = data.draw(st.lists(st.integers(1, 50), min_size=1, max_size=3), label="lengths")
    decode = data.draw(st.booleans(), label="decode")
    new = [1 if decode else data.draw(st.integers(1, n), label="new") for n in lengths]
    heads = data.draw(st.integers(1, 2), label="kv heads")
    group = data.draw(st.integers(1, 5), label="group")
    features = Features(
        data.draw(st.sampled_from([0, 0, 1, 5, 16]), label="window"),
        data.draw(st.sampled_from([0.0, 0.0, 3.0]), label="soft cap"),
        data.draw(st.sampled_from([None, torch.linspace(-2, 2, heads * group)]), label="sinks"),
        data.draw(st.sampled_from([None, torch.linspace(0.01, 0.5, heads * group)]), label="slopes"),
    )
    cache = Cache(
        heads=heads,
        name=name,
        head_size=data.draw(st.sampled_from([16, 24, 40]), label="head size"),
        block_size=data.draw(st.sampled_from([16, 48, 64]), label="block size"),
    )
    batch = Batch(cache, lengths, new, group, data.draw(st.integers(0, 99), label="seed"))
    batch.check(data.draw(st.sampled_from([1, 2, 8]), label="splits"), features)
