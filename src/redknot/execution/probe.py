"""The question pass: which context tokens does the probe attend to?"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from redknot.execution.layer import Placed, Trip, attention, finish
from redknot.kernels.score import column_mass
from redknot.kernels.upload import upload
from redknot.models import Adapter
from redknot.recovery.flops import question_rows
from redknot.recovery.layout import Layout


def probe_mass(
    adapter: Adapter, trip: Trip, token_ids: Int[Tensor, "token"], layout: Layout
) -> Float[Tensor, "layer group token"]:
    """Run all tokens without stored state over the relocated cache and score the probe's rows.

    The rows of ``trip`` must see everything. The pass leaves their K/V in the cache; every plan
    writes these positions again before it reads them. A copy of the probe, where it needs one,
    stands behind the prompt.
    """
    positions = question_rows(layout)
    ids, start, stop = token_ids, *layout.probe
    if not layout.probe_follows_context:
        ids = torch.cat([token_ids, token_ids[start:stop]])
        start, stop = layout.num_tokens, layout.num_tokens + stop - start
    placed = Placed.at(adapter, positions)
    first, last = (int(i) for i in torch.searchsorted(positions, torch.tensor([start, stop])))
    probe = placed.rows.between(first, last)
    trip.cache.reserve(placed.rows.last + 1)
    hidden = adapter.embed(upload(ids[positions], adapter.device))
    mass = torch.zeros(
        len(adapter.layers), adapter.layers[0].shape.num_groups, layout.num_tokens,
        device=adapter.device,
    )  # fmt: skip
    for index, layer in enumerate(adapter.layers):
        found = attention(trip, index, layer, placed, hidden, return_lse=True)
        query, lse = (
            states[:, first:last] for states in (found.query, found.lse) if states is not None
        )
        scored = column_mass(
            query,
            trip.cache.layer(index),
            probe,
            lse,
            scale=layer.shape.scale,
            horizon=layer.shape.horizon,
        )[:, : layout.num_tokens]
        mass[index, :, : scored.shape[1]] = scored
        trip.spent_on("score")
        if index < len(adapter.layers) - 1:
            hidden = finish(layer, hidden, found.out, parts=trip.parts)
            trip.spent_on("finish")
    return mass
