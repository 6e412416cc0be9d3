"""The question pass: which context tokens does the probe attend to?"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from redknot.execution.cache import PromptCache
from redknot.execution.layer import Placed, Trip, attention, finish
from redknot.execution.visibility import Visibility
from redknot.kernels.score import column_mass
from redknot.models import Adapter
from redknot.recovery.flops import question_rows
from redknot.recovery.layout import Layout


def probe_mass(
    adapter: Adapter,
    cache: PromptCache,
    token_ids: Int[Tensor, "token"],
    layout: Layout,
    row_block: int | None = None,
) -> Float[Tensor, "layer group token"]:
    """Run all tokens without stored state over the relocated cache and score the probe's rows.

    The pass leaves K/V of the rows it ran in the cache; every plan writes these positions again
    before it reads them. A copy of the probe, where it needs one, stands behind the prompt, so the
    cache must have room for it.
    """
    shapes = [layer.shape for layer in adapter.layers]
    trip = Trip(cache, Visibility.of(shapes, 0), row_block)
    positions = question_rows(layout)
    ids, start, stop = token_ids, *layout.probe
    if not layout.probe_follows_context:
        ids = torch.cat([token_ids, token_ids[start:stop]])
        start, stop = layout.num_tokens, layout.num_tokens + stop - start
    placed = Placed.at(adapter, positions)
    first, last = (int(i) for i in torch.searchsorted(positions, torch.tensor([start, stop])))
    probe = placed.rows.between(first, last)
    hidden = adapter.embed(ids[positions].to(adapter.device))
    masses = []
    for index, layer in enumerate(adapter.layers):
        attended, query = attention(trip, index, layer, placed, hidden)
        seen = cache.keys[index, :, : probe.last + 1]
        shape = layer.shape
        masses.append(
            column_mass(query[:, first:last], seen, probe, scale=shape.scale, horizon=shape.horizon)
        )
        if index < len(adapter.layers) - 1:
            hidden = finish(layer, hidden, attended)
    mass = torch.stack(masses)[..., : layout.num_tokens].cpu()
    return F.pad(mass, (0, layout.num_tokens - mass.shape[-1]))
