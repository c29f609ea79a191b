"""Interval arithmetic, against sets of single nanoseconds."""

from hypothesis import given
from hypothesis import strategies as st

from jaxpar.tools.profiling.breakdown import Cover, length, subtract, union

PIECES = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)).map(lambda p: (p[0], sum(p))))


def moments(pieces) -> set[int]:
    """The nanoseconds that pieces cover, each by its start."""
    return {t for start, end in pieces for t in range(start, end)}


def is_union(pieces) -> bool:
    """Sorted, and neither empty, overlapping nor touching."""
    ends = [t for piece in pieces for t in piece]
    return ends == sorted(set(ends))


@given(PIECES, PIECES)
def test_against_sets(a, b):
    a_union, b_union = union(a), union(b)
    left = subtract(a_union, b_union)
    assert is_union(a_union) and is_union(left)
    assert moments(a_union) == moments(a)
    assert moments(left) == moments(a) - moments(b)
    assert length(left) == len(moments(left))


@given(PIECES, st.integers(0, 60), st.integers(0, 20))
def test_the_time_outside_a_cover(pieces, start, long):
    outside = Cover(union(pieces)).outside(start, start + long)
    assert outside == len(set(range(start, start + long)) - moments(pieces))


def test_by_hand():
    assert union([(5, 9), (0, 2), (2, 3), (6, 7), (4, 4)]) == [(0, 3), (5, 9)]
    assert subtract([(0, 10), (20, 30)], [(2, 4), (6, 22)]) == [(0, 2), (4, 6), (22, 30)]
    assert subtract([(0, 10)], []) == [(0, 10)] and subtract([], [(0, 1)]) == []
    assert length([(0, 2), (5, 9)]) == 6
