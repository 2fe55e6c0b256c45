"""How much of the reserve a policy lends, and what a step may then have."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.elastic_kv.activation import ActivationModel, Line
from vllm.v1.elastic_kv.reserve import BY_PHASE, LENDING, RESERVE_POLICIES, make_reserve

MODEL = ActivationModel(Line(1000, 0.0, 10.0, 0.01), Line(1500, 0.0, 30.0, 0.02))


def reserve(policy, model=MODEL, most=2048, small=256, decodes=16):
    return make_reserve(policy, model, most, small, decodes)


def test_the_whole_reserve_is_that_of_the_largest_step():
    assert reserve("reclaim").nbytes == 20480
    # 16 tokens with the log probabilities of a prompt, beside 16 that decode, take more than 80 without.
    assert reserve("reclaim", most=80).nbytes == 1500


@pytest.mark.parametrize(
    ("policy", "nbytes"),
    [
        ("static", 0),
        ("on-demand", 0),
        ("small-chunk", 20480 - 2560),
        ("reclaim", 20480 - 1500),
        ("adaptive", 20480 - 1500),
        ("always-lent", 20480 - 1500),
    ],
)
def test_what_is_lent_at_most(policy, nbytes):
    assert reserve(policy).lendable_bytes == nbytes


def test_budgets():
    kept = reserve("adaptive")
    assert kept.budget(0, prompt_logprobs=False) == 2048
    assert kept.budget(0, prompt_logprobs=True) == 682
    assert kept.budget(10480, prompt_logprobs=False) == 1000
    assert reserve("small-chunk").budget(0, prompt_logprobs=False) == 256
    assert reserve("always-lent").budget(18980, prompt_logprobs=True) == 2048


def test_a_small_chunk_is_no_smaller_than_what_decodes():
    assert reserve("small-chunk", small=1).budget(0, prompt_logprobs=False) == 16 + 64


lines = st.builds(Line, st.integers(0, 10**9), st.floats(0, 10**9), st.floats(0, 10**6), st.just(0.0))


@given(
    st.sampled_from([policy for policy in RESERVE_POLICIES if policy != "always-lent"]),
    st.builds(ActivationModel, lines, lines),
    st.integers(1, 32768),
    st.integers(1, 4096),
    st.integers(1, 1024),
    st.floats(0, 1),
)
def test_no_step_needs_more_than_is_left(policy, model, most, small, decodes, part):
    kept = make_reserve(policy, model, most, small, decodes)
    borrowed = int(part * kept.lendable_bytes)
    for logprobs in (False, True):
        budget = kept.budget(borrowed, logprobs)
        # All that decode can go on, and a prompt beside them.
        assert min(most, decodes + 1) <= budget <= most, kept
        assert model.nbytes(budget, logprobs) <= kept.nbytes - borrowed


def test_the_line_of_the_log():
    line = reserve("reclaim").describe(block_bytes=10, block_tokens=32)
    assert "20480 bytes for steps of 2048 tokens" in line
    assert f"{1898 * 32} tokens of KV cache while requests decode" in line
    assert "chunks of 256 tokens would give room for 57344" in line
    assert "a smaller chunk gains as much" in line
    assert "2%" in line
    assert "reclaim gains more" in reserve("reclaim", small=1500).describe(10, 32)
    assert "neither gains" in reserve("reclaim").describe(10**6, 32)


def test_the_policies():
    assert set(BY_PHASE) < set(LENDING) < set(RESERVE_POLICIES)
