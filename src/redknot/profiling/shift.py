"""Prefix shift: how much a head's attention inside a document changes with what stands before it.

The published signal of the public reference. It is stable and, on the embedded model, misleading;
it is kept for comparison.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from redknot.execution.cache import PromptCache
from redknot.execution.layer import Placed, Trip, attention, finish
from redknot.execution.visibility import Visibility
from redknot.kernels.attend import Reach
from redknot.kernels.attend.reference import visible
from redknot.models import Adapter
from redknot.segments import Prompt

ROWS = 32  # last rows of each document that are compared


@torch.inference_mode()
def prefix_shift(
    adapter: Adapter, prompt: Prompt, anchor: tuple[int, ...]
) -> Float[Tensor, "layer group"]:
    """1 - cosine of attention to the own document, in the prompt and alone; the group's largest."""
    inside = _attention_rows(adapter, prompt.token_ids, [(s.start, s.stop) for s in prompt.spans])
    total = torch.zeros(len(adapter.layers), adapter.layers[0].shape.num_groups)
    lead = torch.tensor(anchor, dtype=torch.int64)
    for span, whole in zip(prompt.spans, inside, strict=True):
        ids = torch.cat([lead, prompt.token_ids[span.start : span.stop]])
        (alone,) = _attention_rows(adapter, ids, [(len(lead), len(ids))])
        cosine = torch.cosine_similarity(whole.flatten(3), alone.flatten(3), dim=-1)
        total += (1 - cosine).amax(-1)
    return total / len(prompt.spans)


def _attention_rows(
    adapter: Adapter, token_ids: Int[Tensor, "token"], spans: list[tuple[int, int]]
) -> list[Float[Tensor, "layer group query row*token"]]:
    """Attention of each span's last rows to the span itself, for every query head."""
    shapes = [layer.shape for layer in adapter.layers]
    cache = PromptCache.allocate(adapter, len(token_ids))
    trip = Trip(cache, Visibility.of(shapes, 0))
    placed = Placed.at(adapter, torch.arange(len(token_ids)))
    hidden = adapter.embed(token_ids.to(adapter.device))
    found: list[list[Tensor]] = [[] for _ in spans]
    for index, layer in enumerate(adapter.layers):
        attended = attention(trip, index, layer, placed, hidden)
        keys, _ = cache.read(index, placed.rows.device)
        for rows, (start, stop) in zip(found, spans, strict=True):
            first = max(start, stop - ROWS)
            reach = Reach(horizon=shapes[index].horizon)
            seen = visible(torch.arange(first, stop), stop, reach).to(adapter.device)
            picked = attended.query[:, first:stop].unflatten(0, (shapes[index].num_groups, -1))
            scores = picked @ keys[:, None, :stop].transpose(-1, -2)
            scores = scores.float() * layer.shape.scale
            mass = scores.masked_fill(~seen, float("-inf")).softmax(-1)[..., start:]
            rows.append(mass.flatten(2).cpu())
        hidden = finish(layer, hidden, attended.out)
    return [torch.stack(rows)[:, :, :, None] for rows in found]
