"""Column mass in PyTorch: one KV head at a time, one run of pages after the other."""

import torch
from jaxtyping import Float
from torch import Tensor

from redknot.kernels.attend.rows import Rows
from redknot.kernels.paging import PagedKV


def column_mass(
    query: Float[Tensor, "query_head row dim"],
    kv: PagedKV,
    rows: Rows,
    lse: Float[Tensor, "query_head row"],
    *,
    scale: float,
    horizon: int | None,
    request: int,
) -> Float[Tensor, "kv_head token"]:
    """As `redknot.kernels.score.column_mass`."""
    heads = kv.num_kv_heads
    grouped, peaks = query.unflatten(0, (heads, -1)), lse.unflatten(0, (heads, -1))
    oldest = 0 if horizon is None else max(0, rows.first - horizon + 1)
    own = rows.device[:, None]
    mass = torch.zeros(heads, rows.last + 1, dtype=peaks.dtype, device=query.device)
    for head in range(heads):
        for piece in kv.pieces([request * heads + head], oldest, rows.last + 1):
            scores = ((grouped[head] * scale) @ piece.key[0].T).to(peaks.dtype)
            probabilities = (scores - peaks[head][..., None]).exp()
            key = torch.arange(piece.start, piece.stop, device=query.device)
            if piece.stop > rows.first + 1:
                probabilities.masked_fill_(key > own, 0)
            if horizon is not None and piece.start <= rows.last - horizon:
                probabilities.masked_fill_(key <= own - horizon, 0)
            mass[head, piece.start : piece.stop] = probabilities.mean((0, 1))
    return mass
