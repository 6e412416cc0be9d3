"""Attention in blocks of rows through PyTorch's fused kernel: no [rows, prompt] mask is built."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from redknot.kernels.attend.rows import Reach, Rows

# Rows of one inner call for heads that see everything and for heads with a window. On a CPU a
# small windowed block wastes fewer pairs (64 rows: 1.8x the visible pairs at 30 % gathered rows,
# 256 rows: 4x); on a GPU launches cost more than pairs.
ROW_BLOCKS = {"cpu": (256, 64), "cuda": (2048, 512)}


def attend(
    query: Float[Tensor, "query_head row dim"],
    key: Float[Tensor, "kv_head token dim"],
    value: Float[Tensor, "kv_head token dim"],
    rows: Rows,
    reaches: Sequence[Reach],
    *,
    scale: float,
    row_block: int | None = None,
) -> Float[Tensor, "row query_head*dim"]:
    """As `redknot.kernels.attend.attend`."""
    num_kv_heads, num_rows, dim = key.shape[0], query.shape[1], query.shape[2]
    grouped = query.view(num_kv_heads, -1, num_rows, dim)
    if len(set(reaches)) == 1:
        out = _same_reach(grouped, key, value, rows, reaches[0], scale, row_block)
    else:
        out = torch.empty_like(grouped)
        for reach in dict.fromkeys(reaches):
            heads = [head for head, other in enumerate(reaches) if other == reach]
            out[heads] = _same_reach(
                grouped[heads], key[heads], value[heads], rows, reach, scale, row_block
            )
    return out.permute(2, 0, 1, 3).reshape(num_rows, -1)


def _same_reach(
    query: Float[Tensor, "kv_head group row dim"],
    key: Float[Tensor, "kv_head token dim"],
    value: Float[Tensor, "kv_head token dim"],
    rows: Rows,
    reach: Reach,
    scale: float,
    row_block: int | None,
) -> Float[Tensor, "kv_head group row dim"]:
    spans = _key_spans(rows, reach)
    if row_block is None and rows.first == 0 and rows.consecutive and spans == [(0, len(rows))]:
        if not _hides(rows, reach):
            return _causal(query, key[:, : len(rows)], value[:, : len(rows)], scale)
    size = row_block or ROW_BLOCKS[key.device.type][len(spans) > 1 or _hides(rows, reach)]
    if len(rows) <= size:
        return _block(query, key, value, rows, reach, scale)
    out = torch.empty_like(query)
    for start in range(0, len(rows), size):
        part = slice(start, start + size)
        block = rows.between(start, start + size)
        out[:, :, part] = _block(query[:, :, part], key, value, block, reach, scale)
    return out


def _causal(
    query: Float[Tensor, "kv_head group row dim"],
    key: Float[Tensor, "kv_head row dim"],
    value: Float[Tensor, "kv_head row dim"],
    scale: float,
) -> Float[Tensor, "kv_head group row dim"]:
    flat = query.flatten(0, 1)[None]
    out = F.scaled_dot_product_attention(
        flat, key[None], value[None], is_causal=True, scale=scale, enable_gqa=True
    )
    return out[0].view_as(query)


def _block(
    query: Float[Tensor, "kv_head group row dim"],
    key: Float[Tensor, "kv_head token dim"],
    value: Float[Tensor, "kv_head token dim"],
    rows: Rows,
    reach: Reach,
    scale: float,
) -> Float[Tensor, "kv_head group row dim"]:
    """Attend from one block of rows to the keys that any of them sees; the group is packed."""
    spans = _key_spans(rows, reach)
    if len(spans) == 1:
        keys, values = (state[:, slice(*spans[0])] for state in (key, value))
    else:
        keys, values = (
            torch.cat([state[:, slice(*span)] for span in spans], 1) for state in (key, value)
        )
    mask = None
    if len(rows) > 1 or _hides(rows, reach):
        mask = _mask(rows, reach, spans, query.dtype).repeat(query.shape[1], 1)[None, None]
    out = F.scaled_dot_product_attention(
        query.flatten(1, 2)[None], keys[None], values[None], attn_mask=mask, scale=scale
    )
    return out[0].view_as(query)


def _key_spans(rows: Rows, reach: Reach) -> list[tuple[int, int]]:
    """The spans of keys that some row sees: one, or the sink and the window."""
    stop = rows.last + 1
    horizon = 0 if reach.horizon is None else max(0, rows.first - reach.horizon + 1)
    if reach.window is None:
        return [(horizon, stop)]
    start = max(horizon, rows.first - reach.window + 1)
    if start <= reach.sink or horizon >= reach.sink:
        return [(horizon if start <= reach.sink else start, stop)]
    return [(horizon, reach.sink), (start, stop)]


def _hides(rows: Rows, reach: Reach) -> bool:
    """Whether some row misses a key before it."""
    limits = [limit for limit in (reach.window, reach.horizon) if limit is not None]
    return bool(limits) and rows.last >= min(limits)


def _mask(
    rows: Rows, reach: Reach, spans: list[tuple[int, int]], dtype: torch.dtype
) -> Float[Tensor, "row key"]:
    """Additive mask of one block; rows padded to 8 keys, which fused GPU kernels ask for."""
    device, p = rows.device.device, rows.device[:, None]
    num_keys = sum(stop - start for start, stop in spans)
    mask = torch.zeros(len(rows), -(-num_keys // 8) * 8, dtype=dtype, device=device)
    if _hides(rows, reach):
        j = torch.cat([torch.arange(*span, device=device) for span in spans])[None, :]
        hidden = j > p
        if reach.window is not None:
            hidden |= (j >= reach.sink) & (j <= p - reach.window)
        if reach.horizon is not None:
            hidden |= j <= p - reach.horizon
        mask[:, :num_keys].masked_fill_(hidden, float("-inf"))
    else:  # only keys behind the first row can be hidden
        later = torch.arange(rows.first + 1, rows.last + 1, device=device)[None, :]
        mask[:, num_keys - later.shape[1] : num_keys].masked_fill_(later > p, float("-inf"))
    return mask[:, :num_keys]
