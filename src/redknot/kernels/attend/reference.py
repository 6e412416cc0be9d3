"""The specification of attend: one explicit mask per KV head."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from redknot.kernels.attend.rows import Reach, Rows


def visible(
    positions: Int[Tensor, "row"], num_tokens: int, reach: Reach
) -> Bool[Tensor, "row token"]:
    """Which keys each row may see."""
    p, j = positions[:, None], torch.arange(num_tokens, device=positions.device)[None, :]
    seen = j <= p
    if reach.window is not None:
        seen = seen & ((j < reach.sink) | (j > p - reach.window))
    if reach.horizon is not None:
        seen = seen & (j > p - reach.horizon)
    return seen


def attend(
    query: Float[Tensor, "query_head row dim"],
    key: Float[Tensor, "kv_head token dim"],
    value: Float[Tensor, "kv_head token dim"],
    rows: Rows,
    reaches: Sequence[Reach],
    *,
    scale: float,
) -> Float[Tensor, "row query_head*dim"]:
    """Softmax of the masked scores, head by head."""
    group = query.shape[0] // key.shape[0]
    outputs = []
    for head, reach in enumerate(reaches):
        mask = visible(rows.device, key.shape[1], reach)
        for q in query[head * group : (head + 1) * group]:
            scores = (q @ key[head].T * scale).masked_fill(~mask, float("-inf"))
            outputs.append(torch.nan_to_num(scores.softmax(-1)) @ value[head])
    return torch.stack(outputs, 1).flatten(1)
