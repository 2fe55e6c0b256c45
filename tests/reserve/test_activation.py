"""What steps take, fitted to measured peaks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.elastic_kv.activation import agree, fit, token_counts

MIB = 1 << 20


def test_a_straight_line_is_found():
    line = fit({tokens: 1000 + 50 * tokens for tokens in (64, 512, 1024, 2048)})
    assert line.residual < 1e-9
    assert line.nbytes(4096) == pytest.approx(1000 + 50 * 4096, abs=1)
    assert line.tokens(line.nbytes(777), 2048) == 777


def test_below_the_floor_tokens_cost_nothing():
    """Sampling takes the same for every step."""
    line = fit({64: 100 * MIB, 256: 101 * MIB, 1024: 400 * MIB, 2048: 800 * MIB})
    assert line.floor == 101 * MIB
    assert line.nbytes(1) == 101 * MIB
    assert line.nbytes(1024) == pytest.approx(400 * MIB, abs=1)
    assert line.tokens(101 * MIB - 1, 2048) == 0
    assert line.tokens(101 * MIB, 2048) == pytest.approx(258, abs=1)


@pytest.mark.parametrize("peaks", [{64: 5 * MIB}, {64: 5 * MIB, 2048: 5 * MIB}, {64: 0, 2048: 0}], ids=str)
def test_where_tokens_make_no_difference(peaks):
    line = fit(peaks)
    assert line.nbytes(1 << 20) == peaks[64]
    assert line.tokens(peaks[64], 2048) == 2048


def test_one_point_above_the_floor():
    line = fit({64: 10 * MIB, 512: 10 * MIB, 2048: 40 * MIB})
    assert line.nbytes(2048) == pytest.approx(40 * MIB, abs=1)
    assert line.nbytes(64) == pytest.approx(10 * MIB, abs=1)


def test_the_residual_is_told():
    """The one in the middle is a fifth off what the others say."""
    assert 0.05 < fit({64: 10, 1000: 1000, 2000: 2400, 3000: 3000}).residual < 0.2


def test_no_peak():
    with pytest.raises(ValueError, match="no peak"):
        fit({})


peaks = st.dictionaries(st.integers(1, 32768), st.integers(0, 1 << 40), min_size=1, max_size=8)


@given(peaks)
def test_no_measured_step_takes_more_than_the_model_says(measured):
    line = fit(measured)
    assert all(line.nbytes(tokens) >= nbytes for tokens, nbytes in measured.items())


@given(peaks, st.integers(0, 1 << 41), st.integers(1, 32768))
def test_what_fits_is_the_most_that_fits(measured, nbytes, most):
    line = fit(measured)
    tokens = line.tokens(nbytes, most)
    assert 0 <= tokens <= most
    assert tokens == 0 or line.nbytes(tokens) <= nbytes
    assert tokens == most or line.nbytes(tokens + 1) > nbytes


def test_ranks_agree_on_the_largest():
    model = agree([({64: 10, 128: 30}, {8: 20, 16: 40}), ({64: 12, 128: 25}, {8: 20, 16: 90})])
    assert model.nbytes(128, prompt_logprobs=False) == 30
    assert model.nbytes(64, prompt_logprobs=False) == 12
    assert model.nbytes(16, prompt_logprobs=True) == 90
    with pytest.raises(ValueError, match="no rank"):
        agree([])


def test_which_steps_are_measured():
    assert token_counts(4, 2048) == ([4, 512, 1024, 1536, 2048], [36, 68, 132])
    assert token_counts(4096, 2048) == ([512, 1024, 1536, 2048], [2048])
    assert token_counts(1, 1) == ([1], [1])


def test_a_step_with_log_probabilities_takes_no_less_than_one_without():
    model = agree([({64: 10, 1024: 1000}, {8: 20, 16: 20})])
    assert model.nbytes(1024, prompt_logprobs=True) == 1000
    assert model.tokens(1000, 1024, prompt_logprobs=True) == 1024
