"""The planes behind a pool: what is held survives growth, and copies are of whole pages."""

import numpy as np
import pytest
import torch

from redknot.segpaged import PageStorage

CPU = torch.device("cpu")


def storage(num_pages: int = 4) -> PageStorage:
    widths = {"key": 8, "value": 6}
    made = PageStorage(widths, page_size=4, dtype=torch.float16, device=CPU, num_pages=num_pages)
    for plane in made.planes.values():
        plane.normal_()
    return made


def test_a_page_is_its_tokens_in_every_plane() -> None:
    one = storage()
    assert one.planes["key"].shape == (4, 4, 8)
    assert one.planes["value"].shape == (4, 4, 6)
    assert one.page_bytes == 4 * (8 + 6) * 2
    held = one.pool.allocate(3)
    assert one.num_bytes_used == 3 * one.page_bytes
    one.pool.free(held)
    assert one.num_bytes_used == 0


@pytest.mark.parametrize("held", [1, 3, 4])
@pytest.mark.parametrize("more", [1, 2, 9])
def test_growing_keeps_what_is_held_and_makes_room_to_free_it(held: int, more: int) -> None:
    one = storage()
    pages = one.pool.allocate(held)
    before = {name: plane[pages].clone() for name, plane in one.planes.items()}
    one.grow(more)
    for name, plane in one.planes.items():
        assert len(plane) == 4 + more == one.pool.num_pages
        assert torch.equal(plane[pages], before[name])
    rest = one.pool.allocate(4 + more - held)
    assert one.pool.num_free == 0
    one.pool.free(np.concatenate([rest, pages]))
    one.pool.check([])
    assert one.pool.num_free == 4 + more


def test_growing_an_idle_storage_is_a_bigger_one() -> None:
    one = storage(0)
    one.grow(5)
    assert one.planes["value"].shape == (5, 4, 6)
    assert one.planes["key"].dtype == torch.float16
    assert one.pool.allocate(5).tolist() == [0, 1, 2, 3, 4]


def test_pages_are_copied_whole_and_nothing_else() -> None:
    one = storage(6)
    before = {name: plane.clone() for name, plane in one.planes.items()}
    one.copy(np.array([5, 0], np.int32), np.array([1, 3], np.int32))
    for name, plane in one.planes.items():
        wanted = before[name]
        wanted[[1, 3]] = before[name][[5, 0]]
        assert torch.equal(plane, wanted)
    one.copy(np.array([], np.int32), np.array([], np.int32))


def test_pages_hold_a_token_or_more() -> None:
    with pytest.raises(ValueError, match="pages of 0 tokens"):
        PageStorage({"key": 8}, page_size=0, dtype=torch.float32, device=CPU)
