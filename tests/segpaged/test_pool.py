"""The pool: ids, references, provenance, and damage that `check` finds."""

import numpy as np
import pytest

from redknot.segpaged import CorruptPool, OutOfPages, PagePool, Provenance


def pages(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


def test_a_new_pool_hands_out_consecutive_ids() -> None:
    pool = PagePool(10)
    first, second = pool.allocate(4), pool.allocate(3)
    assert first.tolist() == [0, 1, 2, 3]
    assert second.tolist() == [4, 5, 6]
    assert first.dtype == np.int32
    assert (pool.num_pages, pool.num_used, pool.num_free) == (10, 7, 3)
    pool.check([first, second])


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 2, 0], [0, 3, 1, 2]])
def test_pages_freed_in_any_order_come_back_ascending(order: list[int]) -> None:
    pool = PagePool(10)
    taken = pool.allocate(4)
    pool.allocate(2)
    pool.free(taken[order])
    assert pool.allocate(4).tolist() == [0, 1, 2, 3]


def test_an_emptied_pool_is_as_good_as_new() -> None:
    pool = PagePool(6)
    taken = pool.allocate(6)
    for page in (3, 0, 5, 1, 4, 2):
        pool.free(taken[page : page + 1])
    assert pool.allocate(6).tolist() == list(range(6))


def test_out_of_pages_changes_nothing() -> None:
    pool = PagePool(5)
    pool.allocate(3)
    with pytest.raises(OutOfPages, match="3 pages asked for, 2 can be had") as caught:
        pool.allocate(3)
    assert (caught.value.asked, caught.value.free) == (3, 2)
    pool.check([pages(0, 1, 2)])
    assert pool.allocate(2).tolist() == [3, 4]


def test_a_page_is_free_with_its_last_reference() -> None:
    pool = PagePool(100)
    taken = pool.allocate(3)
    pool.share(pages(0, 0, 2))
    assert pool.references(taken).tolist() == [3, 1, 2]
    pool.free(pages(0, 0, 1))
    assert pool.references(taken).tolist() == [1, 0, 2]
    assert pool.num_free == 98
    pool.free(pages(2, 0, 2))
    pool.check([])


def test_all_references_of_a_page_may_go_in_one_call() -> None:
    pool = PagePool(1000)
    taken = pool.allocate(800)
    pool.share(taken[[799, 0]])
    pool.free(pages(799, 0, 0, 799))  # few and far apart
    pool.check([taken[1:799]])
    pool.share(taken[1:799])
    pool.free(np.tile(taken[1:799], 2))  # many and close
    pool.check([])
    assert pool.num_free == 1000


@pytest.mark.parametrize("bad", [(0, 0), (2,), (0, 3), (-1,), (4,)])
def test_what_is_not_held_cannot_be_freed(bad: tuple[int, ...]) -> None:
    pool = PagePool(4)
    taken = pool.allocate(2)
    with pytest.raises(ValueError, match="held"):
        pool.free(pages(*bad))
    pool.check([taken])


@pytest.mark.parametrize("bad", [2, -1, 4])
def test_what_is_not_held_cannot_be_shared_sealed_or_moved(bad: int) -> None:
    pool = PagePool(4)
    taken = pool.allocate(2)
    with pytest.raises(ValueError, match="not held"):
        pool.share(pages(0, bad))
    with pytest.raises(ValueError, match="not held"):
        pool.seal(pages(0, bad), Provenance.EXACT)
    with pytest.raises(ValueError, match="not held"):
        pool.move(pages(0, bad), 1)
    pool.check([taken])
    assert pool.writable(taken).all()


def test_only_derived_pages_with_one_reference_are_writable() -> None:
    pool = PagePool(4)
    taken = pool.allocate(4)
    pool.share(taken[:1])
    pool.seal(taken[1:2], Provenance.CANONICAL)
    pool.seal(taken[2:3], Provenance.EXACT)
    assert pool.writable(taken).tolist() == [False, False, False, True]
    assert pool.provenance(taken).tolist() == [0, 1, 2, 0]


def test_a_seal_is_final_until_the_page_is_free() -> None:
    pool = PagePool(1)
    taken = pool.allocate(1, Provenance.CANONICAL)
    pool.seal(taken, Provenance.CANONICAL)
    for other in (Provenance.EXACT, Provenance.DERIVED):
        with pytest.raises(ValueError, match="only derived"):
            pool.seal(taken, other)
    assert pool.provenance(taken).tolist() == [Provenance.CANONICAL]
    pool.free(taken)
    assert pool.writable(pool.allocate(1)).all()


def test_sealing_as_derived_is_refused() -> None:
    pool = PagePool(1)
    with pytest.raises(ValueError, match="only derived"):
        pool.seal(pool.allocate(1), Provenance.DERIVED)


def test_a_pool_grows_while_pages_are_held() -> None:
    pool = PagePool(3)
    taken = pool.allocate(2)
    pool.grow(2)
    assert (pool.num_pages, pool.num_free) == (5, 3)
    rest = pool.allocate(3)
    assert rest.tolist() == [2, 3, 4]
    pool.check([taken, rest])
    pool.free(taken)
    pool.free(rest)
    pool.check([])


def test_pages_are_counted_by_partition() -> None:
    pool = PagePool(8)
    first, second = pool.allocate(3, partition=1), pool.allocate(2, partition=2)
    assert [pool.used_by(part) for part in range(4)] == [0, 3, 2, 0]
    pool.move(first[:1], 2)
    pool.check()
    assert [pool.used_by(part) for part in range(4)] == [0, 2, 3, 0]
    pool.free(np.concatenate([first, second]))
    assert [pool.used_by(part) for part in range(4)] == [0, 0, 0, 0]
    assert [pool.freed_by(part) for part in range(4)] == [0, 2, 3, 0]


@pytest.mark.parametrize("count", [-1])
def test_negative_counts_are_refused(count: int) -> None:
    pool = PagePool(2)
    with pytest.raises(ValueError, match="-1 pages"):
        pool.allocate(count)
    with pytest.raises(ValueError, match="-1 pages"):
        pool.grow(count)
    with pytest.raises(ValueError, match="-1 pages"):
        PagePool(count)


def test_empty_calls_do_nothing() -> None:
    pool = PagePool(2)
    none = pool.allocate(0)
    pool.share(none)
    pool.free(none)
    pool.seal(none, Provenance.EXACT)
    pool.check([none])


def test_leaks_double_owners_and_strangers_are_found() -> None:
    pool = PagePool(4)
    taken = pool.allocate(2)
    for holders in ([], [taken, taken], [taken[:1]], [taken, pages(2)]):
        with pytest.raises(CorruptPool, match="references and holders differ"):
            pool.check(holders)
    for stranger in (-1, 4):
        with pytest.raises(CorruptPool, match="does not exist"):
            pool.check([taken, pages(stranger)])


@pytest.mark.parametrize(
    ("field", "index", "value", "message"),
    [
        ("_references", 3, 1, "free list"),
        ("_references", 0, 0, "free list"),
        ("_references", 0, -1, "fewer than no"),
        ("_free", 0, 0, "free list"),
        ("_partition", 0, 5, "partitions"),
        ("_used", 0, 1, "partitions"),
    ],
)
def test_damage_is_found(field: str, index: int, value: int, message: str) -> None:
    pool = PagePool(4)
    pool.allocate(2)
    getattr(pool, field)[index] = value
    with pytest.raises(CorruptPool, match=message):
        pool.check()
