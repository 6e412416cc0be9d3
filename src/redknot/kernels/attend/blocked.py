"""Attention in blocks of rows through PyTorch's fused kernels: no [rows, prompt] mask is built."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from redknot.kernels.attend.rows import Reach, Rows

# Rows of one inner call, for heads that see everything before them and for heads with a window. On
# a CPU a small windowed block wastes fewer pairs (64 rows: 1.8x the visible ones at 30 % gathered
# rows, 256 rows: 4x; 40 ms against 83 ms at 4,500 tokens); on a GPU launches cost more than pairs.
ROW_BLOCKS = {"cpu": (128, 64), "cuda": (2048, 1024)}


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
    out = query.new_empty(num_rows, num_kv_heads, grouped.shape[1], dim)
    for reach in dict.fromkeys(reaches):
        heads = [head for head, other in enumerate(reaches) if other == reach]
        few = len(heads) < num_kv_heads
        part = (grouped[heads], key[heads], value[heads]) if few else (grouped, key, value)
        found = _same_reach(*part, rows, reach, scale, row_block).permute(2, 0, 1, 3)
        if few:
            out[:, heads] = found
        else:
            out = found
    return out.reshape(num_rows, -1)


def _same_reach(
    query: Float[Tensor, "kv_head group row dim"],
    key: Float[Tensor, "kv_head token dim"],
    value: Float[Tensor, "kv_head token dim"],
    rows: Rows,
    reach: Reach,
    scale: float,
    row_block: int | None,
) -> Float[Tensor, "kv_head group row dim"]:
    whole = rows.first == 0 and rows.consecutive and not _hides(rows, reach)
    if row_block is None and whole:
        return _causal(query, key[:, : len(rows)], value[:, : len(rows)], scale)
    size = row_block or ROW_BLOCKS[key.device.type][_hides(rows, reach)]
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
    packed = query.flatten(1, 2)
    if not _hides(rows, reach):
        return _seen_and_ragged(packed, key, value, rows, scale).view_as(query)
    spans = _key_spans(rows, reach)
    if len(spans) == 1:
        keys, values = (state[:, slice(*spans[0])] for state in (key, value))
    else:
        keys, values = (
            torch.cat([state[:, slice(*span)] for span in spans], 1) for state in (key, value)
        )
    position = torch.cat([torch.arange(*span, device=key.device) for span in spans])[None, :]
    own = rows.device[:, None]
    hidden = position > own
    if reach.window is not None:
        hidden |= (position >= reach.sink) & (position <= own - reach.window)
    if reach.horizon is not None:
        hidden |= position <= own - reach.horizon
    return _masked(packed, keys, values, hidden, scale).view_as(query)


def _seen_and_ragged(
    packed: Float[Tensor, "kv_head row dim"],
    key: Float[Tensor, "kv_head token dim"],
    value: Float[Tensor, "kv_head token dim"],
    rows: Rows,
    scale: float,
) -> Float[Tensor, "kv_head row dim"]:
    """Rows that see every key before them: only keys from the first row on need a mask.

    On a CPU the two parts are calls of their own, merged by log-sum-exp: a mask over all keys costs
    as much time as the attention itself.
    """
    border, stop = rows.first, rows.last + 1
    if len(rows) == 1:
        return F.scaled_dot_product_attention(
            packed[None], key[None, :, :stop], value[None, :, :stop], scale=scale
        )[0]
    ragged = torch.arange(border, stop, device=key.device)[None, :] > rows.device[:, None]
    if border == 0 or key.device.type != "cpu":
        hidden = F.pad(ragged, (border, 0))
        return _masked(packed, key[:, :stop], value[:, :stop], hidden, scale)
    bias = _bias(ragged, packed)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    seen, seen_lse = flash(
        packed[None], key[None, :, :border], value[None, :, :border], scale=scale
    )
    late, late_lse = flash(
        packed[None],
        key[None, :, border:stop],
        value[None, :, border:stop],
        attn_mask=bias,
        scale=scale,
    )
    share = (late_lse - seen_lse).sigmoid()[..., None]
    return torch.lerp(seen, late, share.to(seen.dtype))[0]


def _masked(
    packed: Float[Tensor, "kv_head row dim"],
    key: Float[Tensor, "kv_head key dim"],
    value: Float[Tensor, "kv_head key dim"],
    hidden: Float[Tensor, "own key"],
    scale: float,
) -> Float[Tensor, "kv_head row dim"]:
    return F.scaled_dot_product_attention(
        packed[None], key[None], value[None], attn_mask=_bias(hidden, packed), scale=scale
    )[0]


def _bias(hidden: Tensor, packed: Tensor) -> Float[Tensor, "1 1 row key"]:
    """Additive mask, repeated for the packed group; rows padded to 8 keys for fused GPU kernels."""
    num_rows, num_keys = hidden.shape
    bias = torch.zeros(num_rows, -(-num_keys // 8) * 8, dtype=packed.dtype, device=packed.device)
    bias[:, :num_keys].masked_fill_(hidden, float("-inf"))
    return bias.repeat(packed.shape[1] // num_rows, 1)[None, None, :, :num_keys]


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
