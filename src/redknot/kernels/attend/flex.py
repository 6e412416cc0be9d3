"""Attention through PyTorch's FlexAttention, over a contiguous copy of the pages."""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from redknot.kernels.attend.plan import AttendPlan, Part, limits
from redknot.kernels.paging import PagedKV


@torch.no_grad()
def attend(
    query: Tensor, kv: PagedKV, plan: AttendPlan, *, scale: float, return_lse: bool = False
) -> tuple[Tensor, Tensor | None]:
    """As `redknot.kernels.attend.attend`; compiled on a GPU."""
    outs, lses, first = [], [], 0
    for part in plan.parts:
        rows = slice(first, first + len(part.rows))
        out, lse = _part(query[:, rows], kv, part, scale)
        outs.append(out.transpose(0, 1).flatten(1))
        lses.append(lse)
        first = rows.stop
    return torch.cat(outs), torch.cat(lses, 1) if return_lse else None


def _part(query: Tensor, kv: PagedKV, part: Part, scale: float) -> tuple[Tensor, Tensor]:
    heads, stop = kv.num_kv_heads, part.rows.last + 1
    streams = slice(part.request * heads, (part.request + 1) * heads)
    pages = kv.table[streams, : -(-stop // kv.page_size)].to(torch.int64).clamp(min=0)
    key, value = (
        plane[pages].flatten(1, 2)[:, :stop].contiguous()[None] for plane in (kv.key, kv.value)
    )
    limit = torch.tensor([limits(reach) for reach in part.reaches], device=query.device)
    position, group = part.rows.device, query.shape[0] // heads
    held = (kv.table[streams] >= 0).repeat_interleave(kv.page_size, 1)[:, :stop]
    value = value.masked_fill(~held[None, :, :, None], 0)

    def sees(batch: Tensor, head: Tensor, row: Tensor, j: Tensor) -> Tensor:
        window, sink, horizon = (limit[head // group, index] for index in range(3))
        own = position[row]
        return (j <= own) & ((j > own - window) | (j < sink)) & (j > own - horizon)

    from torch.nn.attention.flex_attention import create_block_mask

    mask = create_block_mask(
        sees, 1, query.shape[0], len(part.rows), stop, device=query.device, _compile=query.is_cuda
    )
    out, lse = _flex(query.is_cuda)(
        query[None], key, value, block_mask=mask, scale=scale, enable_gqa=True, return_lse=True
    )
    return out[0], lse[0]


@lru_cache
def _flex(compiled: bool) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False) if compiled else flex_attention
