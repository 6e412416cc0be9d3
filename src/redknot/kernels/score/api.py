"""Column mass: the mean attention probability of every key over rows, by KV head."""

import torch
from jaxtyping import Float
from torch import Tensor

from redknot.kernels.attend.rows import Rows


def column_mass(
    query: Float[Tensor, "query_head row dim"],
    key: Float[Tensor, "kv_head token dim"],
    rows: Rows,
    *,
    scale: float,
    horizon: int | None = None,
) -> Float[Tensor, "kv_head token"]:
    """Mean over the query heads of a KV head and over rows of the causal attention probability.

    In float32; keys behind the model's own sliding window ``horizon`` get nothing. One KV head at a
    time, so that scores of all heads never stand side by side.
    """
    num_kv_heads, num_tokens = key.shape[:2]
    grouped = query.view(num_kv_heads, -1, *query.shape[1:])
    border = min(rows.first + 1, num_tokens)  # keys up to here are seen by every row
    later = torch.arange(border, num_tokens, device=key.device)[None, :] > rows.device[:, None]
    past = None
    if horizon is not None and rows.last >= horizon:
        tokens = torch.arange(num_tokens, device=key.device)[None, :]
        past = tokens <= rows.device[:, None] - horizon
    masses = []
    for q, k in zip(grouped, key, strict=True):
        scores = ((q * scale) @ k.T).float()
        scores[..., border:].masked_fill_(later, float("-inf"))
        if past is not None:
            scores.masked_fill_(past, float("-inf"))
        masses.append(scores.softmax(-1).flatten(0, 1).mean(0))
    return torch.stack(masses)
