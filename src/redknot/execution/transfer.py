"""Segment state on its way to the device, one segment ahead of its use."""

from collections.abc import Iterator, Sequence

import torch

from redknot.segments import SegmentState


def on_device(states: Sequence[SegmentState], device: torch.device) -> Iterator[SegmentState]:
    """``states`` in order on ``device``.

    On a GPU a stream of its own copies the next state while the present one is used; from
    page-locked memory the host does not wait.
    """
    if device.type != "cuda":
        yield from states
        return
    stream, main = torch.cuda.Stream(device), torch.cuda.current_stream(device)
    stream.wait_stream(main)
    coming = None
    for state in states:
        before, coming = coming, _copied(state, device, stream)
        if before is not None:
            yield _arrived(before, main)
    if coming is not None:
        yield _arrived(coming, main)


Arrival = tuple[SegmentState, torch.cuda.Event | None]


def _copied(state: SegmentState, device: torch.device, stream: torch.cuda.Stream) -> Arrival:
    if all(plane.is_cuda for plane in state.planes.values()):
        return state, None
    with torch.cuda.stream(stream):
        planes = {name: plane.to(device, non_blocking=True) for name, plane in state.planes.items()}
    return SegmentState(state.token_ids, planes), stream.record_event()


def _arrived(arrival: Arrival, main: torch.cuda.Stream) -> SegmentState:
    state, event = arrival
    if event is not None:
        main.wait_event(event)
        for plane in state.planes.values():
            plane.record_stream(main)  # its memory is the other stream's
    return state
