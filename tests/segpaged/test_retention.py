"""Pages between the positions that future rows see: against explicit sets of positions."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redknot.kernels.attend import Reach
from redknot.segpaged import FutureRows, Retention

LIMITS = st.none() | st.integers(1, 40)
REACHES = st.builds(
    lambda window, sink, horizon: Reach(window, sink if window else 0, horizon),
    LIMITS,
    st.integers(0, 40),
    LIMITS,
)
FAR = 400  # rows that stand for all later ones; no window reaches back from there


def visible(position: int, reach: Reach) -> set[int]:
    """What one row sees, position by position."""
    window = position + 1 if reach.window is None else reach.window
    horizon = position + 1 if reach.horizon is None else reach.horizon
    return {
        p
        for p in range(position + 1)
        if (p < reach.sink or p > position - window) and p > position - horizon
    }


def seen_pages(stages: tuple[FutureRows, ...], start: int, size: int) -> set[int]:
    """Pages with a position that a row at ``start`` or later sees."""
    pages: set[int] = set()
    for stage in stages:
        stop = FAR if stage.stop is None else min(stage.stop, FAR)
        for row in range(max(start, stage.first), stop):
            pages |= {position // size for position in visible(row, stage.reach)}
    return pages


@settings(deadline=None, max_examples=150)
@given(
    stages=st.lists(
        st.builds(FutureRows, REACHES, st.integers(0, 120), st.none() | st.integers(0, 120)),
        max_size=3,
    ).map(tuple),
    start=st.integers(0, 120),
    size=st.sampled_from([1, 3, 8, 16]),
    num_pages=st.integers(0, 20),
)
def test_gaps_are_the_pages_that_no_future_row_sees(
    stages: tuple[FutureRows, ...], start: int, size: int, num_pages: int
) -> None:
    found: list[int] = []
    for rows, first, stop in Retention.of([stages]).gaps(start, size, num_pages):
        assert rows.tolist() == [0]
        assert first < stop
        found.extend(range(first, stop))
    assert found == sorted(set(range(num_pages)) - seen_pages(stages, start, size))


def test_rows_of_equal_future_are_one_class() -> None:
    whole, local = Reach(), Reach(8, 2)
    made = Retention.phased([whole, local, local], [local, whole, whole], 100, np.array([5, 7, 9]))
    assert [rows.tolist() for rows, _ in made.classes] == [[5], [7, 9]]
    assert made.classes[0][1] == (FutureRows(whole, 0, 100), FutureRows(local, 100))


def test_context_rows_to_come_and_decode_rows_both_count() -> None:
    made = Retention.phased([Reach(16)], [Reach(64, 4)], 128)
    # rows 80.. see 65..; rows 128.. see 65.. and the sinks
    assert [gap[1:] for gap in made.gaps(80, 16, 5)] == [(1, 4)]
    assert [gap[1:] for gap in made.gaps(128, 16, 8)] == [(1, 4)]
    assert [gap[1:] for gap in made.gaps(144, 16, 9)] == [(1, 5)]


def test_a_window_that_decode_does_not_share_ends_with_the_context() -> None:
    made = Retention.phased([Reach()], [Reach(16)], 64)
    assert list(made.gaps(63, 16, 3)) == []
    assert [gap[1:] for gap in made.gaps(64, 16, 4)] == [(0, 3)]


def test_a_narrow_span_inside_a_wide_one_opens_no_gap() -> None:
    made = Retention.of([(FutureRows(Reach()), FutureRows(Reach(16), 0, 64))])
    assert list(made.gaps(32, 16, 20)) == []


def test_lengths_must_agree() -> None:
    with pytest.raises(ValueError, match="1 futures for 2 rows"):
        Retention.of([()], np.array([0, 1]))
    with pytest.raises(ValueError, match="zip"):
        Retention.phased([Reach()], [], 4)
