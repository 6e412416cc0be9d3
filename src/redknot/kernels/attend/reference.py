"""The specification of attend: one explicit mask per KV head."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from redknot.kernels.attend.plan import AttendPlan
from redknot.kernels.attend.rows import Reach
from redknot.kernels.paging import PagedKV


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
    query: Float[Tensor, "query_head row dim"], kv: PagedKV, plan: AttendPlan, *, scale: float
) -> tuple[Float[Tensor, "row query_head*dim"], Float[Tensor, "query_head row"]]:
    """Softmax of the masked scores and its log-sum-exp, head by head."""
    grouped = query.unflatten(0, (kv.num_kv_heads, -1))
    outputs, lses, first = [], [], 0
    for part in plan.parts:
        rows = slice(first, first + len(part.rows))
        for head, reach in enumerate(part.reaches):
            stream = part.request * kv.num_kv_heads + head
            mask = visible(part.rows.device, part.rows.last + 1, reach)
            held = mask.any(0).nonzero()[:, 0]
            page = kv.table[stream].to(torch.int64)[held // kv.page_size]
            key, value = (plane[page, held % kv.page_size] for plane in (kv.key, kv.value))
            scores = grouped[head, :, rows] @ key.T * scale
            scores = scores.masked_fill(~mask[:, held], float("-inf"))
            outputs.append(torch.nan_to_num(scores.softmax(-1)) @ value)
            lses.append(scores.to(torch.promote_types(scores.dtype, torch.float32)).logsumexp(-1))
        first = rows.stop
    return _by_rows(outputs, kv.num_kv_heads).flatten(1), _by_rows(lses, kv.num_kv_heads).T


def _by_rows(found: list[Tensor], num_kv_heads: int) -> Tensor:
    """Of [group, row, ...] by part and KV head: [row, query head, ...]."""
    parts = [
        torch.cat(found[start : start + num_kv_heads]).transpose(0, 1)
        for start in range(0, len(found), num_kv_heads)
    ]
    return torch.cat(parts)
