"""Pages as pieces: views where they can be, copies where they must be, and what is refused."""

import itertools

import pytest
import torch
from torch import Tensor

from redknot.kernels.paging import PagedKV

SIZE = 4


def paged(*streams: list[int], kv_heads: int = 1) -> PagedKV:
    planes = torch.randn(2, 40, SIZE, 8, generator=torch.Generator().manual_seed(0))
    return PagedKV(planes[0], planes[1], torch.tensor(streams, dtype=torch.int32), kv_heads)


def right(kv: PagedKV, plane: Tensor, streams: list[int], start: int, stop: int) -> Tensor:
    rows = [[plane[kv.table[s, j // SIZE], j % SIZE] for j in range(start, stop)] for s in streams]
    return torch.stack([torch.stack(row) for row in rows])


def check(kv: PagedKV, streams: list[int], start: int, stop: int) -> list[bool]:
    """Compare with single reads; whether each piece is a view."""
    pieces = kv.pieces(streams, start, stop)
    assert pieces[0].start == start
    assert pieces[-1].stop == stop
    assert all(a.stop == b.start for a, b in itertools.pairwise(pieces))
    for plane, index in ((kv.key, 1), (kv.value, 2)):
        joined = torch.cat([piece[index] for piece in pieces], 1)
        assert torch.equal(joined, right(kv, plane, streams, start, stop))
    memory = kv.key.untyped_storage().data_ptr()
    return [piece.key.untyped_storage().data_ptr() == memory for piece in pieces]


@pytest.mark.parametrize(
    ("tables", "views"),
    [
        ([[3, 4, 5, 6, 7, 8]], [True]),
        ([[3, 4, 5, 6, 7, 8], [10, 11, 12, 13, 14, 15]], [True]),
        ([[0, 1, 2, 3, 4, 5], [10, 11, 12, 13, 14, 15], [20, 21, 22, 23, 24, 25]], [True]),
        ([[0, 1, 2, 3, 4, 5], [10, 11, 12, 13, 14, 15], [21, 22, 23, 24, 25, 26]], [False]),
        ([[9, 4, 30, 2, 7, 8]], [False]),
        ([[9, 10, 11, 12, 2, 7]], [True, False]),
        ([[2, 7, 9, 10, 11, 12]], [False, True]),
        ([[2, 9, 10, 11, 12, 7]], [True, True, True]),
        ([[2, 9, 10, 11, 7, 8]], [False]),
        ([[5, 5, 5, 5, 5, 5]], [False]),
        ([[3, 4, 5, 6, 7, 8]] * 2, [True]),
    ],
)
def test_consecutive_pages_are_views(tables: list[list[int]], views: list[bool]) -> None:
    kv, streams = paged(*tables, kv_heads=len(tables)), list(range(len(tables)))
    assert check(kv, streams, 0, 24) == views
    for start, stop in itertools.combinations((0, 1, 3, 4, 5, 11, 16, 17, 23, 24), 2):
        check(kv, streams, start, stop)


def test_views_share_memory_with_the_planes() -> None:
    kv = paged([3, 4, 5, 6, 7, 8])
    (piece,) = kv.pieces([0], 5, 22)
    assert piece.key.data_ptr() == kv.key[4, 1].data_ptr()
    assert piece.value.data_ptr() == kv.value[4, 1].data_ptr()
    kv.key[4, 1] = 7
    assert bool((piece.key[0, 0] == 7).all())


@pytest.mark.parametrize("streams", [[2], [0, 2], [1, 2], [2, 0]])
def test_streams_may_be_any_of_the_table(streams: list[int]) -> None:
    kv = paged([0, 1, 2, 3], [10, 11, 12, 13], [20, 22, 21, 23], kv_heads=3)
    check(kv, streams, 1, 15)


@pytest.mark.parametrize("tables", [([9], [3]), ([20, 21, 22, 23], [10, 11, 12, 13])])
def test_pages_may_descend_from_stream_to_stream(tables: tuple[list[int], ...]) -> None:
    check(paged(*tables, kv_heads=2), [0, 1], 0, SIZE * len(tables[0]))


def test_no_positions_are_no_pieces() -> None:
    assert sum(p.key.shape[1] for p in paged([3, 4]).pieces([0], 4, 4)) == 0


@pytest.mark.parametrize(("start", "stop"), [(0, 9), (8, 9), (11, 12), (5, 16)])
def test_absent_pages_are_refused(start: int, stop: int) -> None:
    kv = paged([3, 4, -1, 6])
    with pytest.raises(ValueError, match="not all held"):
        kv.pieces([0], start, stop)
    check(kv, [0], 0, 8)
    check(kv, [0], 12, 16)


def test_contiguous_states_are_pages_of_their_own() -> None:
    key, value = torch.randn(2, 3, 10, 8)
    kv = PagedKV.dense(key, value)
    assert (kv.page_size, kv.num_requests, kv.capacity, kv.num_kv_heads) == (10, 1, 10, 3)
    (piece,) = kv.pieces([0, 1, 2], 2, 9)
    assert torch.equal(piece.key, key[:, 2:9])
    assert torch.equal(piece.value, value[:, 2:9])
    assert piece.key.data_ptr() == key[:, 2:].data_ptr()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int16, torch.float32])
def test_a_table_of_another_dtype_is_refused(dtype: torch.dtype) -> None:
    """KN-06."""
    plane = torch.zeros(4, SIZE, 8)
    with pytest.raises(ValueError, match="a table is int32"):
        PagedKV(plane, plane, torch.zeros(2, 2, dtype=dtype), 1)


def test_tables_and_planes_that_do_not_fit_are_refused() -> None:
    """KN-06."""
    plane, table = torch.zeros(4, SIZE, 8), torch.zeros(3, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match="3 streams of 2 KV heads"):
        PagedKV(plane, plane, table, 2)
    for other in (torch.zeros(3, SIZE, 8), torch.zeros(4, SIZE + 1, 8)):
        with pytest.raises(ValueError, match="planes of"):
            PagedKV(plane, other, table, 1)
