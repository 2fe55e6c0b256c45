"""Ranges that are taken together are the same bytes as before."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.v1.elastic_kv.ranges import evenly_spaced, joined


@st.composite
def ranges(draw):
    """Ranges in order, many of them alike, with gaps of any size."""
    made, at = [], 0
    for gap, nbytes in draw(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 2)), max_size=12)):
        made.append((at + gap, nbytes))
        at += gap + nbytes
    return made


@settings(max_examples=40)
@given(ranges())
def test_joined(given_ranges):
    made = joined(reversed(given_ranges))
    assert {byte for at, nbytes in made for byte in range(at, at + nbytes)} == {
        byte for at, nbytes in given_ranges for byte in range(at, at + nbytes)
    }
    assert all(sum(first) < second[0] for first, second in pairwise(made))


@settings(max_examples=40)
@given(ranges())
def test_evenly_spaced(given_ranges):
    groups = evenly_spaced(given_ranges)
    assert [one for group in groups for one in group] == given_ranges
    for group in groups:
        assert len({nbytes for _, nbytes in group}) == 1
        assert len({second[0] - first[0] for first, second in pairwise(group)}) <= 1


def test_segments_are_one_group():
    assert evenly_spaced([(segment * 64, 16) for segment in range(32)]) == [[(n * 64, 16) for n in range(32)]]
