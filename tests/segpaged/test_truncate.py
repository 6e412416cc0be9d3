"""Going back: positions from some token on are forgotten and may be appended again."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redknot.kernels.attend import Reach
from redknot.segpaged import PagePool, PageTable, Retention


@settings(max_examples=60, deadline=None)
@given(
    first=st.integers(0, 40), kept=st.integers(0, 40), again=st.integers(0, 40),
    size=st.sampled_from([1, 4, 16]),
)  # fmt: skip
def test_what_is_left_stays_where_it_was(first: int, kept: int, again: int, size: int) -> None:
    kept = min(kept, first)
    pool = PagePool(300)
    table = PageTable(pool, 3, page_size=size)
    table.append(first)
    before = table.logical().copy()
    table.truncate(kept)
    assert table.length == kept
    assert np.array_equal(table.logical(), before[:, : -(-kept // size)])
    assert pool.num_used == 3 * -(-kept // size)
    table.append(again)
    assert table.num_pages == pool.num_used == 3 * -(-(kept + again) // size)
    table.check()
    pool.check([table.held])


def test_a_fork_keeps_what_the_other_forgets() -> None:
    pool = PagePool(100)
    table = PageTable(pool, 2, page_size=4)
    table.append(10)
    other = table.fork()
    table.truncate(5)
    change = table.append(3)
    assert change.sources.tolist() == other.logical()[:, 1].tolist()  # the shared page in work
    assert other.length == 10
    assert (other.logical() >= 0).all()
    pool.check([table.held, other.held])


def test_pages_that_were_evicted_before_may_be_dropped_again_behind() -> None:
    """What `keep` remembers of a row must not outlive a truncation."""
    pool = PagePool(200)
    table = PageTable(pool, 1, page_size=4)
    retention = Retention.of([()])  # nobody will see anything
    table.append(40)
    assert table.keep(retention, 40) == 10
    table.truncate(0)
    table.append(40)
    assert table.keep(retention, 40) == 10
    local = Retention.phased([Reach(4)], [Reach(4)], 0)
    table.truncate(8)
    table.append(32)
    assert table.keep(local, 40) == 7
    pool.check([table.held])


@pytest.mark.parametrize("tokens", [-1, 11])
def test_only_positions_that_are_there_can_be_kept(tokens: int) -> None:
    table = PageTable(PagePool(10), 1, page_size=4)
    table.append(10)
    with pytest.raises(ValueError, match="of 10 tokens"):
        table.truncate(tokens)
