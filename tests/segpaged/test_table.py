"""The page table: growth, eviction, sharing, copies before writes, adoption."""

import numpy as np
import pytest

from redknot.kernels.attend import Reach
from redknot.segpaged import (
    CorruptPool,
    FutureRows,
    OutOfPages,
    PagePool,
    PageTable,
    Provenance,
    Retention,
    Run,
)

LOCAL, WHOLE = Reach(8, 2), Reach()


def table(rows: int = 2, tokens: int = 0, pages: int = 1000, page_size: int = 4) -> PageTable:
    made = PageTable(PagePool(pages), rows, page_size=page_size)
    made.append(tokens)
    return made


def later(*reaches: Reach) -> Retention:
    return Retention.of([(FutureRows(reach),) for reach in reaches])


def verify(*tables: PageTable) -> None:
    for one in tables:
        one.check()
    tables[0].pool.check([one.held for one in tables])


def test_each_row_gets_consecutive_pages() -> None:
    made = table(2, 10)
    assert made.logical().tolist() == [[0, 1, 2], [3, 4, 5]]
    assert (made.length, made.num_pages, made.num_rows) == (10, 6, 2)
    verify(made)


def test_append_allocates_missing_pages_only_and_says_which() -> None:
    made = table(2, 3)
    assert made.append(1).pages.tolist() == [[0], [1]]
    assert made.num_pages == 2
    change = made.append(5)
    assert (change.first_page, change.pages.tolist()) == (1, [[2, 3], [4, 5]])
    assert len(change.sources) == len(change.targets) == 0
    change = made.append(4)
    assert (change.first_page, change.pages.tolist()) == (2, [[3, 6], [5, 7]])
    verify(made)


def test_an_append_of_nothing_changes_nothing() -> None:
    made = table(2, 6)
    other = made.fork()
    change = made.append(0)
    assert change.pages.shape == (2, 0)
    assert len(change.targets) == 0
    assert np.array_equal(made.logical(), other.logical())


def test_changes_follow_into_a_copy_of_the_view() -> None:
    made, copy = table(3), np.full((3, 64), -1, np.int32)
    for tokens in (3, 1, 17, 0, 6, 33):
        change = made.append(tokens)
        copy[:, change.first_page : change.first_page + change.pages.shape[1]] = change.pages
        assert np.array_equal(copy[:, : -(-made.length // 4)], made.logical())


def test_out_of_pages_leaves_the_table_alone() -> None:
    made = table(2, 8, pages=5)
    with pytest.raises(OutOfPages):
        made.append(1)
    assert (made.length, made.num_pages, made.pool.num_free) == (8, 4, 1)
    verify(made)


def test_the_view_cannot_be_written() -> None:
    with pytest.raises(ValueError, match="read-only"):
        table(1, 4).logical()[0, 0] = 7


def test_windows_drop_what_no_row_sees() -> None:
    made = table(3, 32)
    held = made.num_pages
    assert made.evictable(later(LOCAL, WHOLE, LOCAL), 32) == 10
    assert made.keep(later(LOCAL, WHOLE, LOCAL), 32) == 10
    assert (made.logical()[0] >= 0).tolist() == [True, *[False] * 5, True, True]
    assert (made.logical()[1] >= 0).all()
    assert np.array_equal(made.logical()[0] < 0, made.logical()[2] < 0)
    assert made.num_pages == held - 10
    assert made.keep(later(LOCAL, WHOLE, LOCAL), 32) == 0
    made.append(4)
    assert made.keep(later(LOCAL, WHOLE, LOCAL), 36) == 2
    verify(made)


def test_the_page_being_filled_stays() -> None:
    made = table(1, 6)
    assert made.keep(Retention.of([()]), 100) == 1
    assert (made.logical()[0] >= 0).tolist() == [False, True]


def test_a_narrower_future_after_a_wider_one_finds_older_pages() -> None:
    made = table(2, 64)
    made.keep(later(Reach(4, 20), Reach(30)), 64)
    made.keep(later(Reach(4), Reach(30)), 64)
    assert (made.logical() >= 0).sum(1).tolist() == [1, 8]
    made.keep(later(Reach(4), Reach(9)), 64)
    assert (made.logical() >= 0).sum(1).tolist() == [1, 2]
    verify(made)


def test_rows_that_join_a_class_late_are_searched_from_their_own_start() -> None:
    made = table(2, 64)
    made.keep(later(LOCAL, WHOLE), 64)
    assert made.keep(later(LOCAL, LOCAL), 64) == 13
    verify(made)


def test_pages_that_will_not_be_seen_are_never_allocated() -> None:
    made = table(2)
    change = made.append(32, later(LOCAL, WHOLE), next_position=32)
    assert (change.pages >= 0).sum(1).tolist() == [3, 8]
    assert made.pool.num_used == 11
    made.append(6, later(LOCAL, WHOLE))  # the rows from 32 on
    assert (made.logical()[0] >= 0).tolist() == [True, *[False] * 5, *[True] * 4]
    verify(made)


def test_release_drops_whole_pages_of_some_rows() -> None:
    made = table(2, 18)
    assert made.release(np.array([1]), 3, 15) == 2
    assert (made.logical() >= 0).tolist() == [[True] * 5, [True, False, False, True, True]]
    assert made.release(None, 16, 18) == 2  # all that the last page holds
    assert (made.logical()[:, 4] < 0).all()
    assert made.release(None, 0, 8) == 3
    verify(made)
    made.append(1)
    assert (made.logical()[:, 4] >= 0).all()


def test_a_fork_shares_until_one_writes() -> None:
    one = table(2, 6)
    two = one.fork()
    assert two.length == 6
    assert one.pool.num_used == 4
    before = one.logical().copy()
    change = two.append(1)
    assert change.sources.tolist() == before[:, 1].tolist()
    assert change.targets.tolist() == two.logical()[:, 1].tolist()
    assert np.array_equal(one.logical(), before)
    assert np.array_equal(two.logical()[:, 0], before[:, 0])
    assert not set(change.targets.tolist()) & set(before.reshape(-1).tolist())
    assert len(one.append(1).sources) == 0  # the only holder by now
    verify(one, two)


def test_a_fork_at_a_page_border_copies_nothing() -> None:
    one = table(2, 8)
    two = one.fork()
    assert len(two.append(3).sources) == 0
    verify(one, two)


def test_eviction_in_a_fork_leaves_the_other() -> None:
    one = table(1, 32)
    two = one.fork()
    assert two.evictable(later(LOCAL), 32) == 0  # none would become free
    assert two.keep(later(LOCAL), 32) == 5
    assert one.num_pages == 8
    verify(one, two)
    assert one.evictable(later(LOCAL), 32) == 5


def test_freeing_empties_the_table() -> None:
    made = table(2, 32)
    made.keep(later(LOCAL, LOCAL), 32)
    made.free()
    assert (made.length, made.num_pages, made.pool.num_used) == (0, 0, 0)
    made.append(64)
    assert made.keep(later(LOCAL, LOCAL), 64) == 26
    verify(made)


def test_sealing_takes_full_pages_only() -> None:
    made = table(2, 14)
    made.seal(Provenance.EXACT, 11)
    assert made.pool.provenance(made.logical()).tolist() == [[2, 2, 0, 0]] * 2
    made.seal(Provenance.EXACT, 14)
    assert made.pool.provenance(made.logical()).tolist() == [[2, 2, 2, 0]] * 2
    assert len(made.append(1).sources) == 0
    with pytest.raises(ValueError, match="16 of 15"):
        made.seal(Provenance.EXACT, 16)


def test_runs_split_at_absence_and_provenance() -> None:
    made = table(2, 30)
    made.seal(Provenance.CANONICAL, 20)
    made.keep(later(LOCAL, WHOLE), 30)
    runs = [(run.first_position, run.num_tokens, len(run.pages), run.provenance)
            for run in made.runs(1)]  # fmt: skip
    assert runs == [(0, 20, 5, Provenance.CANONICAL), (20, 10, 3, Provenance.DERIVED)]
    assert [(run.first_position, run.num_tokens) for run in made.runs(0)] == [(0, 4), (20, 10)]
    pages = np.concatenate([run.pages for run in made.runs(0)])
    assert pages.tolist() == made.logical()[0][made.logical()[0] >= 0].tolist()
    assert table(1).runs(0) == []


def test_an_adopted_run_is_shared_and_its_last_page_copied_before_a_write() -> None:
    one = table(2, 12)
    one.seal(Provenance.EXACT, 12)
    run = one.span(0, 10, Provenance.EXACT)
    two = PageTable(one.pool, 2, page_size=4)
    two.adopt(run)
    assert two.length == 10
    assert np.array_equal(two.logical(), one.logical())
    assert (one.pool.references(one.held) == 2).all()
    one.free()
    change = two.append(1)
    assert change.sources.tolist() == run.pages[:, 2].tolist()
    assert two.pool.writable(two.logical()[:, 2]).all()
    assert not set(change.targets) & set(change.sources)
    verify(two)


def test_runs_follow_each_other_and_keep_absent_pages() -> None:
    one = table(2, 16)
    one.keep(later(LOCAL, WHOLE), 16)
    two = PageTable(one.pool, 2, page_size=4)
    two.append(4)
    two.adopt(Run(4, 16, one.logical().copy(), Provenance.DERIVED))
    assert two.length == 20
    assert np.array_equal(two.logical()[:, 1:], one.logical())
    verify(one, two)


@pytest.mark.parametrize(("first", "tokens", "rows"), [(0, 4, 2), (12, 4, 2), (8, 4, 1), (8, 5, 2)])
def test_a_run_that_does_not_fit_is_refused(first: int, tokens: int, rows: int) -> None:
    made = table(2, 8)
    run = Run(first, tokens, made.logical()[:rows, :1].copy(), Provenance.DERIVED)
    with pytest.raises(ValueError, match=r"run from|tokens in"):
        made.adopt(run)
    verify(made)


def test_a_run_cannot_begin_inside_a_page() -> None:
    made = table(1, 6)
    with pytest.raises(ValueError, match="no run"):
        made.span(2, 4, Provenance.DERIVED)
    with pytest.raises(ValueError, match="no run"):
        made.span(4, 7, Provenance.DERIVED)
    run = Run(6, 4, made.logical()[:, :1].copy(), Provenance.DERIVED)
    with pytest.raises(ValueError, match="run from"):
        made.adopt(run)


def test_sizes_are_checked() -> None:
    for rows, size in ((0, 4), (1, 0)):
        with pytest.raises(ValueError, match="rows of pages"):
            PageTable(PagePool(1), rows, page_size=size)
    with pytest.raises(ValueError, match="-1 tokens"):
        table().append(-1)


def test_damage_is_found() -> None:
    for row, page, value, message in (
        (0, 0, 900, "not held"),
        (0, 0, 1000, "not held"),
        (0, 0, -2, "outside"),
        (0, 0, 3, "two places"),
    ):
        made = table(2, 8)
        made._pages[row, page] = value
        with pytest.raises(CorruptPool, match=message):
            made.check()
    made = table(1, 8)
    made.append(1)
    made._length = 4
    with pytest.raises(CorruptPool, match="outside"):
        made.check()


def test_growth_keeps_entries_and_steps_are_amortised() -> None:
    made = table(2)
    for _ in range(200):
        made.append(3)
    assert sorted(made.held.tolist()) == list(range(300))
    assert made._pages.shape[1] <= 225
    verify(made)
