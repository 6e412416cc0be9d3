"""Eviction policies: what goes first, what stays."""

import math

import numpy as np
import pytest

from redknot.kernels.attend import Reach
from redknot.segpaged import (
    FutureRows,
    NoEviction,
    PagePool,
    PageTable,
    Retention,
    ScoredEviction,
    WindowEviction,
)


def scored(pool: PagePool, names: str, half_life: float = 1024.0) -> tuple[ScoredEviction, list]:
    gone: list = []
    policy = ScoredEviction(pool, half_life=half_life, on_evict=gone.append)
    for name in names:
        policy.register(name, pool.allocate(2))
    return policy, gone


def test_the_longest_unused_goes_first_among_equals() -> None:
    pool = PagePool(20)
    policy, gone = scored(pool, "abc")
    policy.touch("a")
    assert policy.evict(3) == 4
    assert gone == ["b", "c"]
    assert pool.num_used == 2


@pytest.mark.parametrize(("half_life", "first"), [(0.01, "a"), (1000.0, "b"), (math.inf, "b")])
def test_the_half_life_weighs_recency_against_frequency(half_life: float, first: str) -> None:
    policy, gone = scored(PagePool(20), "a", half_life)
    for _ in range(3):
        policy.touch("a")
    policy.register("b", policy._pool.allocate(1))
    policy.evict(1)
    assert gone == [first]


@pytest.mark.parametrize(("wait", "first"), [(2, "b"), (8, "a")])
def test_a_use_counts_half_after_its_half_life(wait: int, first: str) -> None:
    policy, gone = scored(PagePool(40), "a", half_life=4)
    for _ in range(2):
        policy.touch("a")  # about 3 uses: as much as one fresh use after log2(3) half-lives
    policy.register("c", policy._pool.allocate(1))
    for _ in range(wait - 1):
        policy.touch("c")
    policy.register("b", policy._pool.allocate(1))
    policy.remove("c")
    policy.evict(1)
    assert gone == [first]


def test_entries_in_use_stay() -> None:
    pool = PagePool(20)
    policy, gone = scored(pool, "abc")
    used = policy._pages["a"][1:]
    pool.share(used)
    assert policy.evictable() == 4
    assert policy.evict(100) == 4
    assert gone == ["b", "c"]
    pool.free(used)
    assert policy.evictable() == 2
    assert policy.evict(1) == 2
    assert pool.num_used == policy.evict(1) == 0


def test_a_removed_entry_hands_its_reference_back() -> None:
    pool = PagePool(20)
    policy, gone = scored(pool, "ab")
    pages = policy.remove("a")
    assert (pool.references(pages) == 1).all()
    assert policy.evict(100) == 2
    assert gone == ["b"]
    policy.register("c", pool.allocate(1))
    with pytest.raises(ValueError, match="'c' exists"):
        policy.register("c", pages)


@pytest.mark.parametrize("half_life", [0.0, -1.0, math.nan])
def test_half_lives_are_positive(half_life: float) -> None:
    with pytest.raises(ValueError, match="half-life"):
        ScoredEviction(PagePool(1), half_life=half_life)


def test_no_eviction_gives_nothing() -> None:
    assert NoEviction().evictable() == NoEviction().evict(5) == 0


def test_windows_are_dropped_table_by_table_and_only_what_is_unseen() -> None:
    pool = PagePool(100)
    policy = WindowEviction(pool)
    tables = [PageTable(pool, 1, page_size=4) for _ in range(3)]
    retention = Retention.of([(FutureRows(Reach(8)),)])
    for table in tables:
        table.append(32)
        policy.register(table, retention)
    assert policy.evictable() == policy.evict(5) == 0
    for table in tables:
        policy.register(table, retention, 32)
    assert policy.evictable() == 18
    assert policy.evict(5) == 6
    assert [table.num_pages for table in tables] == [2, 8, 8]
    policy.remove(tables[1])
    assert policy.evict(100) == 6
    assert [table.num_pages for table in tables] == [2, 8, 2]
    assert policy.evictable() == 0


def test_shared_pages_do_not_count_as_evictable() -> None:
    pool = PagePool(100)
    policy = WindowEviction(pool)
    table = PageTable(pool, 1, page_size=4)
    table.append(32)
    policy.register(table, Retention.of([(FutureRows(Reach(8)),)]), 32)
    held = np.array(table.logical()[0, :2])
    pool.share(held)
    assert policy.evictable() == 4
    assert policy.evict(1) == 4
