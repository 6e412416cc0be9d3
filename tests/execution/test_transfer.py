"""Segment state arrives whole and in order, however its copies are used on the way."""

import pytest
import torch

from redknot.execution.transfer import on_device
from redknot.segments import SegmentState

CPU = torch.device("cpu")


def states(count: int, tokens: int, *, pinned: bool = False) -> list[SegmentState]:
    """Of different lengths and contents."""
    generator, made = torch.Generator().manual_seed(0), []
    for index in range(count):
        shape = (3, 2, tokens + index, 16)
        planes = {name: torch.randn(shape, generator=generator) for name in ("key", "value")}
        if pinned:
            planes = {name: plane.pin_memory() for name, plane in planes.items()}
        made.append(SegmentState(torch.arange(tokens + index) + index, planes))
    return made


def test_on_the_host_states_pass_as_they_are() -> None:
    given = states(3, 5)
    found = list(on_device(given, CPU))
    assert len(found) == 3
    assert all(got is state for got, state in zip(found, given, strict=True))
    assert list(on_device([], CPU)) == []


def test_states_are_taken_one_by_one() -> None:
    """Nobody needs all of them at once."""
    passing = on_device(states(2, 5), CPU)
    assert len(next(passing)) == 5
    assert len(next(passing)) == 6
    with pytest.raises(StopIteration):
        next(passing)


gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="copies to a GPU")


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("count", [0, 1, 2, 9])
def test_states_arrive_whole_and_in_order(count: int, pinned: bool) -> None:
    device, given = torch.device("cuda"), states(count, 300, pinned=pinned)
    found = list(on_device(given, device))
    assert len(found) == count
    for got, state in zip(found, given, strict=True):
        assert torch.equal(got.token_ids.cpu(), state.token_ids)
        assert set(got.planes) == set(state.planes)
        for name, plane in state.planes.items():
            assert got.planes[name].is_cuda
            assert torch.equal(got.planes[name].cpu(), plane)


@pytest.mark.gpu
@gpu
def test_copies_may_be_overwritten_and_dropped_while_the_next_one_comes() -> None:
    """The device is kept busy, so that the host runs ahead of it: a copy that were read too early,
    or whose memory were given to the next one too early, would hold something else."""
    device, given = torch.device("cuda"), states(24, 20_000, pinned=True)
    busy = torch.randn(4096, 4096, device=device)
    sums = []
    for state in on_device(given, device):
        for _ in range(4):
            busy = (busy @ busy).clamp(-1, 1)
        seen = {name: plane.clone() for name, plane in state.planes.items()}
        for plane in state.planes.values():
            plane.fill_(float("nan"))
        del state, plane
        clutter = [torch.full_like(plane, 7.0) for plane in seen.values()]  # takes what is free
        sums.append({name: plane.view(torch.int32).sum() for name, plane in seen.items()})
        del clutter, seen
    for found, state in zip(sums, given, strict=True):
        for name, plane in state.planes.items():
            assert int(found[name]) == int(plane.view(torch.int32).sum())


@pytest.mark.gpu
@gpu
def test_what_is_there_already_is_not_copied() -> None:
    device = torch.device("cuda")
    host = states(3, 50)
    moved = {name: plane.to(device) for name, plane in host[1].planes.items()}
    given = [host[0], SegmentState(host[1].token_ids, moved), host[2]]
    found = list(on_device(given, device))
    assert all(found[1].planes[name] is plane for name, plane in moved.items())
    for index in (0, 2):
        for name, plane in host[index].planes.items():
            assert torch.equal(found[index].planes[name].cpu(), plane)


@pytest.mark.gpu
@gpu
def test_the_host_does_not_wait_for_page_locked_memory() -> None:
    """All copies are asked for while the device still works on what came before."""
    device, given = torch.device("cuda"), states(4, 300, pinned=True)
    busy = torch.randn(8192, 8192, device=device)
    list(on_device(given, device))
    torch.cuda.synchronize()
    for _ in range(20):
        busy = (busy @ busy).clamp(-1, 1)
    done = torch.cuda.current_stream().record_event()
    list(on_device(given, device))
    assert not done.query()
    torch.cuda.synchronize()
