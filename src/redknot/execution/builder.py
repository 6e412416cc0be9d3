"""Canonical building: a segment's state, computed alone behind the anchor by the dense model."""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from redknot.execution.cache import PromptCache
from redknot.execution.layer import Placed, Trip, attention, finish
from redknot.execution.parts import EAGER, Parts
from redknot.execution.turns import Turns
from redknot.execution.visibility import Visibility
from redknot.kernels.upload import upload
from redknot.models import Adapter
from redknot.segments import SegmentState
from redknot.segpaged import PageStorage


class StateRecorder:
    """Copies un-rotated keys and values of consecutive rows into the state of ``token_ids``.

    ``skipped`` first rows of the pass belong to something else.
    """

    def __init__(
        self, adapter: Adapter, token_ids: Int[Tensor, "token"], *, skipped: int = 0
    ) -> None:
        shape = adapter.layers[0].shape
        like = torch.empty(0, dtype=adapter.dtype, device=adapter.device)
        self.state = SegmentState.empty(
            token_ids.clone(), len(adapter.layers), shape.num_groups, shape.head_dim, like
        )
        self._skipped = skipped

    def __call__(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Take the rows behind the skipped ones, as many as the state holds."""
        rows = slice(self._skipped, self._skipped + len(self.state))
        self.state.planes["key"][layer] = key[:, rows]
        self.state.planes["value"][layer] = value[:, rows]


@torch.inference_mode()
def building(
    adapter: Adapter,
    token_ids: Int[Tensor, "token"],
    anchor: Sequence[int],
    *,
    storage: PageStorage | None = None,
    parts: Parts = EAGER,
) -> Turns[SegmentState]:
    """State of ``token_ids`` behind ``anchor``, in turns; depends on nothing else.

    The K/V of the pass stand in ``storage`` meanwhile, or in pages of their own.
    """
    ids = torch.cat([torch.tensor(anchor, dtype=torch.int64), token_ids])
    shapes = [layer.shape for layer in adapter.layers]
    recorder = StateRecorder(adapter, token_ids, skipped=len(anchor))
    cache = PromptCache.allocate(adapter, len(ids), storage)
    trip = Trip(cache, Visibility.of(shapes, 0), record=recorder, parts=parts)
    placed = Placed.at(adapter, torch.arange(len(ids)))
    hidden = adapter.embed(upload(ids, adapter.device))
    for index, layer in enumerate(adapter.layers):
        last = index == len(adapter.layers) - 1
        found = attention(trip, index, layer, placed, hidden, tail=1 if last else None)
        if not last:
            hidden = finish(layer, hidden, found.out, parts=parts)
        yield len(ids)
    return recorder.state
