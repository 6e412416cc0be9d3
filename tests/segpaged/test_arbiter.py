"""Partitions: own quota, loans, call-backs, eviction, refusals and their counters."""

from dataclasses import replace

import numpy as np
import pytest

from redknot.kernels.attend import Reach
from redknot.segpaged import (
    Arbiter,
    FutureRows,
    OutOfPages,
    PagePool,
    PageTable,
    PartitionConfig,
    PartitionsConfig,
    Provenance,
    Retention,
    ScoredEviction,
    Tag,
    WindowEviction,
)

QUARTERS = PartitionsConfig(
    global_=PartitionConfig(share=0.25),
    local=PartitionConfig(share=0.25),
    segment=PartitionConfig(share=0.25, low=0.6, high=0.8),
    prefix=PartitionConfig(share=0.25, low=1.0, high=1.0),
)


def arbiter(config: PartitionsConfig = QUARTERS, pages: int = 40) -> Arbiter:
    pool = PagePool(pages)
    cached = (Tag.SEGMENT, Tag.PREFIX)
    return Arbiter(pool, {tag: ScoredEviction(pool) for tag in cached}, config)


def cache(made: Arbiter, tag: Tag, *sizes: int) -> None:
    for size in sizes:
        policy = made._policies[tag]
        policy.register(len(policy._pages), made.allocate(tag, size))


def test_quotas_follow_the_pool() -> None:
    made = Arbiter(PagePool(1000))
    assert [made.quota(tag) for tag in Tag] == [400, 100, 350, 150]
    made.pool.grow(1000)
    assert made.quota(Tag.LOCAL) == 200


def test_within_the_quota_nothing_is_borrowed() -> None:
    made = arbiter()
    assert made.allocate(Tag.LOCAL, 10).tolist() == list(range(10))
    assert made.used(Tag.LOCAL) == 10
    counters = made.counters(Tag.LOCAL)
    assert (counters.allocated, counters.borrowed, counters.freed) == (10, 0, 0)


def test_all_unused_pages_can_be_borrowed() -> None:
    made = arbiter()
    made.allocate(Tag.PREFIX, 4)
    pages = made.allocate(Tag.GLOBAL, 36)
    assert made.counters(Tag.GLOBAL).borrowed == 26
    assert [made.counters(tag).lent for tag in Tag] == [0, 10, 10, 6]
    made.pool.free(pages[:30])
    assert made.counters(Tag.GLOBAL).freed == 30
    made.allocate(Tag.GLOBAL, 6)
    assert made.counters(Tag.GLOBAL).borrowed == 28
    made.pool.check()


def test_loans_are_charged_once_and_to_the_one_with_most_unused_pages() -> None:
    made = arbiter()
    made.allocate(Tag.LOCAL, 8)
    for count in (12, 3):
        made.allocate(Tag.GLOBAL, count)
    assert made.counters(Tag.GLOBAL).borrowed == 5
    assert [made.counters(tag).lent for tag in Tag] == [0, 0, 5, 0]


def test_what_one_tag_evicts_beyond_its_need_serves_the_next() -> None:
    made = arbiter()
    made.allocate(Tag.GLOBAL, 20)
    made.allocate(Tag.LOCAL, 10)
    cache(made, Tag.SEGMENT, *[1] * 10)
    made.allocate_all({Tag.SEGMENT: 1, Tag.GLOBAL: 4})
    assert [made.used(tag) for tag in Tag] == [24, 10, 6, 0]


def test_what_was_lent_is_called_back_from_those_beyond_their_quota() -> None:
    made = arbiter()
    cache(made, Tag.SEGMENT, *[3] * 10)
    cache(made, Tag.PREFIX, 10)
    made.allocate(Tag.LOCAL, 5)
    assert made.used(Tag.SEGMENT) == 24
    assert made.used(Tag.PREFIX) == 10
    assert made.counters(Tag.LOCAL).called_back == 5
    assert made.counters(Tag.SEGMENT).evicted == 6
    assert made.pool.num_free == 1


def test_nobody_is_called_back_below_its_quota() -> None:
    made = arbiter()
    cache(made, Tag.SEGMENT, *[1] * 12)
    cache(made, Tag.PREFIX, *[1] * 10)
    made.allocate(Tag.LOCAL, 10)
    made.allocate(Tag.GLOBAL, 8)
    made.allocate(Tag.GLOBAL, 2)
    assert (made.used(Tag.SEGMENT), made.used(Tag.PREFIX)) == (10, 10)
    with pytest.raises(OutOfPages):
        made.allocate(Tag.GLOBAL, 1)
    assert (made.used(Tag.SEGMENT), made.used(Tag.PREFIX)) == (10, 10)


def test_a_partition_beyond_its_own_quota_calls_nobody_back() -> None:
    made = arbiter()
    made.allocate(Tag.LOCAL, 12)
    cache(made, Tag.SEGMENT, *[1] * 28)
    with pytest.raises(OutOfPages) as caught:
        made.allocate(Tag.LOCAL, 1)
    assert (caught.value.asked, caught.value.free) == (1, 0)
    assert made.counters(Tag.LOCAL).refused == 1
    assert made.used(Tag.SEGMENT) == 28
    with pytest.raises(OutOfPages) as caught:
        made.allocate(Tag.GLOBAL, 11)  # ten are due, no more
    assert caught.value.free == 10
    made.allocate(Tag.GLOBAL, 10)
    assert made.used(Tag.SEGMENT) == 18


def test_the_one_most_beyond_its_quota_gives_way_first() -> None:
    made = arbiter()
    cache(made, Tag.SEGMENT, *[1] * 18)
    cache(made, Tag.PREFIX, *[1] * 22)
    made.allocate(Tag.LOCAL, 10)
    assert (made.used(Tag.SEGMENT), made.used(Tag.PREFIX)) == (18, 12)
    made.allocate(Tag.GLOBAL, 9)
    assert (made.used(Tag.SEGMENT), made.used(Tag.PREFIX)) == (10, 11)


def test_own_eviction_goes_on_to_the_low_watermark() -> None:
    made = arbiter()
    made.allocate(Tag.GLOBAL, 20)
    made.allocate(Tag.LOCAL, 10)
    cache(made, Tag.SEGMENT, *[1] * 10)
    cache(made, Tag.SEGMENT, 1)
    assert made.used(Tag.SEGMENT) == 6
    assert made.counters(Tag.SEGMENT).evicted == 5
    assert made.counters(Tag.SEGMENT).called_back == 0


def test_below_the_high_watermark_only_what_is_missing_is_evicted() -> None:
    made = arbiter()
    made.allocate(Tag.GLOBAL, 22)
    made.allocate(Tag.LOCAL, 10)
    cache(made, Tag.SEGMENT, *[1] * 8)
    cache(made, Tag.SEGMENT, 2)
    assert made.used(Tag.SEGMENT) == 8
    assert made.counters(Tag.SEGMENT).evicted == 2


def test_the_low_watermark_counts_from_what_is_in_use() -> None:
    made = arbiter()
    cache(made, Tag.SEGMENT, *[1] * 40)
    cache(made, Tag.SEGMENT, 1)
    assert made.used(Tag.SEGMENT) == 24


def test_a_watermark_of_one_evicts_what_is_missing() -> None:
    made = arbiter()
    cache(made, Tag.PREFIX, *[1] * 40)
    cache(made, Tag.PREFIX, 3)
    assert made.used(Tag.PREFIX) == 40


def test_a_partition_that_does_not_lend_keeps_its_unused_pages() -> None:
    config = replace(QUARTERS, local=PartitionConfig(share=0.25, lends=False))
    made = arbiter(config)
    with pytest.raises(OutOfPages) as caught:
        made.allocate(Tag.GLOBAL, 31)
    assert caught.value.free == 30
    made.allocate(Tag.GLOBAL, 30)
    assert made.counters(Tag.LOCAL).lent == 0
    made.allocate(Tag.LOCAL, 10)
    assert made.pool.num_free == 0


def test_a_refusal_changes_nothing_even_for_several_tags() -> None:
    made = arbiter()
    cache(made, Tag.SEGMENT, *[1] * 30)
    made.allocate(Tag.PREFIX, 5)
    with pytest.raises(OutOfPages):
        made.allocate_all({Tag.LOCAL: 10, Tag.GLOBAL: 16})
    assert (made.used(Tag.SEGMENT), made.used(Tag.LOCAL), made.pool.num_free) == (30, 0, 5)
    assert made.counters(Tag.LOCAL).refused == 0
    assert made.counters(Tag.GLOBAL).refused == 16
    got = made.allocate_all({Tag.LOCAL: 10, Tag.GLOBAL: 10}, Provenance.EXACT)
    assert [len(got[tag]) for tag in (Tag.LOCAL, Tag.GLOBAL)] == [10, 10]
    assert (made.pool.provenance(got[Tag.LOCAL]) == Provenance.EXACT).all()
    assert made.used(Tag.SEGMENT) == 15
    made.pool.check()


def test_rows_of_a_table_draw_on_their_own_partitions() -> None:
    made = arbiter()
    tags = [Tag.LOCAL, Tag.GLOBAL, Tag.LOCAL]
    table = PageTable(made.pool, 3, page_size=4, allocate=made.by_row(tags))
    table.append(12)
    assert [made.used(tag) for tag in Tag] == [3, 6, 0, 0]
    assert made.pool._partition[table.logical()].tolist() == [[1] * 3, [0] * 3, [1] * 3]
    table.keep(Retention.of([(FutureRows(Reach(4)),)], np.array([2])), 12)
    assert [made.used(tag) for tag in Tag] == [3, 4, 0, 0]
    other = table.fork()
    table.free()
    other.append(40)
    assert made.used(Tag.GLOBAL) == 13
    made.pool.check([other.held])


def test_an_append_may_evict_unseen_pages_of_the_same_table() -> None:
    pool = PagePool(10)
    policy = WindowEviction(pool)
    made = Arbiter(pool, {Tag.LOCAL: policy})
    table = PageTable(pool, 1, page_size=4, allocate=made.by_row([Tag.LOCAL]))
    table.append(38)
    policy.register(table, Retention.of([(FutureRows(Reach(8)),)]), 38)
    table.append(10)
    assert (table.logical()[0] >= 0).tolist() == [False] * 7 + [True] * 5
    assert made.counters(Tag.LOCAL).evicted == 7
    table.check()
    pool.check([table.held])


def test_settings_are_checked() -> None:
    for bad in ({"share": 1.1}, {"share": 0.1, "low": 0.9, "high": 0.5}):
        with pytest.raises(ValueError, match=r"share of 1\.1|not ordered"):
            PartitionConfig(**bad)
    with pytest.raises(ValueError, match="add up"):
        PartitionsConfig(local=PartitionConfig(share=0.5))
