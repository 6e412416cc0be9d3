"""Attention in blocks of rows through PyTorch's fused kernels: no [rows, prompt] mask is built."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from redknot.kernels.attend.plan import AttendPlan
from redknot.kernels.attend.rows import Reach, Rows
from redknot.kernels.merge import merge
from redknot.kernels.paging import PagedKV, Piece

# Rows of one inner call, for heads that see everything before them and for heads with a window. On
# a CPU a small windowed block wastes fewer pairs (64 rows: 1.8x the visible ones at 30 % gathered
# rows, 256 rows: 4x; 40 ms against 83 ms at 4,500 tokens); on a GPU launches cost more than pairs.
ROW_BLOCKS = {"cpu": (128, 64), "cuda": (2048, 1024)}


class Attended(NamedTuple):
    """Output and, where it was asked for, its log-sum-exp."""

    out: Float[Tensor, "kv_head row dim"]
    lse: Float[Tensor, "kv_head row"] | None


def attend(
    query: Float[Tensor, "query_head row dim"],
    kv: PagedKV,
    plan: AttendPlan,
    *,
    scale: float,
    row_block: int | None = None,
    return_lse: bool = False,
) -> tuple[Float[Tensor, "row query_head*dim"], Float[Tensor, "query_head row"] | None]:
    """As `redknot.kernels.attend.attend`."""
    heads, num_rows, dim = kv.num_kv_heads, query.shape[1], query.shape[2]
    grouped = query.unflatten(0, (heads, -1))
    group = grouped.shape[1]
    out = query.new_empty(num_rows, heads, group, dim)
    lse = query.new_empty(heads, group, num_rows, dtype=torch.float32) if return_lse else None
    first = 0
    for part in plan.parts:
        mine = slice(first, first + len(part.rows))
        for reach in dict.fromkeys(part.reaches):
            own = [head for head, other in enumerate(part.reaches) if other == reach]
            streams = [part.request * heads + head for head in own]
            members: slice | list[int] = slice(None) if len(own) == heads else own
            call = _Call(kv, streams, part.rows, reach, scale, return_lse)
            for rows, found in call.blocks(grouped[members, :, mine], row_block):
                where = slice(first + rows.start, first + rows.stop)
                shape = (len(own), group, where.stop - where.start)
                out[where, members] = found.out.view(*shape, dim).permute(2, 0, 1, 3)
                if lse is not None and found.lse is not None:
                    lse[members, :, where] = found.lse.view(shape)
        first = mine.stop
    return out.view(num_rows, -1), None if lse is None else lse.flatten(0, 1)


class _Call:
    """Rows of one request and the streams that show them the same reach."""

    def __init__(
        self,
        kv: PagedKV,
        streams: list[int],
        rows: Rows,
        reach: Reach,
        scale: float,
        return_lse: bool,
    ) -> None:
        self._rows, self._reach = rows, reach
        self._scale, self._return_lse = scale, return_lse
        spans = reach.spans(rows.first, rows.last + 1)
        self._pieces = [p for span in spans for p in kv.pieces(streams, *span, gaps=True)]

    def blocks(
        self, query: Float[Tensor, "kv_head group row dim"], row_block: int | None
    ) -> Iterator[tuple[slice, Attended]]:
        """Attention of all rows, block by block."""
        rows, reach = self._rows, self._reach
        whole = rows.first == 0 and rows.consecutive and not _hides(rows, reach)
        if whole and row_block is None and len(self._pieces) == 1 and not self._return_lse:
            yield slice(0, len(rows)), Attended(self._causal(query), None)
            return
        size = row_block or ROW_BLOCKS[query.device.type][_hides(rows, reach)]
        for start in range(0, len(rows), size):
            part = slice(start, min(start + size, len(rows)))
            yield part, self._block(query[:, :, part], rows.between(part.start, part.stop))

    def _causal(self, query: Float[Tensor, "kv_head group row dim"]) -> Tensor:
        (piece,) = self._pieces
        out = F.scaled_dot_product_attention(
            query.flatten(0, 1)[None],
            piece.key[None],
            piece.value[None],
            is_causal=True,
            scale=self._scale,
            enable_gqa=True,
        )
        return out[0].unflatten(0, query.shape[:2]).flatten(1, 2)

    def _block(self, query: Float[Tensor, "kv_head group row dim"], rows: Rows) -> Attended:
        """Attend from one block of rows to the keys that any of them sees; the group is packed."""
        packed, reach = query.flatten(1, 2), self._reach
        spans = reach.spans(rows.first, rows.last + 1)
        pieces = [cut for span in spans for cut in _between(self._pieces, *span)]
        self._require(rows, spans, pieces)
        if not pieces:
            empty = packed.new_full(packed.shape[:2], float("-inf"), dtype=torch.float32)
            return Attended(torch.zeros_like(packed), empty)
        if _hides(rows, reach) or packed.device.type != "cpu" or rows.first == 0:
            return self._masked(packed, pieces, rows)
        return self._seen_and_ragged(packed, pieces, rows)

    def _require(self, rows: Rows, spans: list[tuple[int, int]], pieces: list[Piece]) -> None:
        """ValueError unless every key that a row sees is held."""
        if sum(p.key.shape[1] for p in pieces) == sum(stop - start for start, stop in spans):
            return
        wanted = torch.cat([torch.arange(*span) for span in spans])
        there = torch.cat([wanted[:0], *(torch.arange(p.start, p.stop) for p in pieces)])
        absent = wanted[~torch.isin(wanted, there)]
        if not bool(_hidden(absent[None, :], rows.host[:, None], self._reach).all()):
            raise ValueError(f"rows {rows.first} to {rows.last}: keys that are not all held")

    def _seen_and_ragged(self, packed: Tensor, pieces: list[Piece], rows: Rows) -> Attended:
        """Rows that see every key before them: only keys from the first row on need a mask.

        Calls of their own, merged by log-sum-exp: on a CPU a mask over all keys costs as much time
        as the attention itself.
        """
        border, stop = rows.first if len(rows) > 1 else rows.last + 1, rows.last + 1
        seen, ragged = _between(pieces, 0, border), _between(pieces, border, stop)
        alone = len(seen) == 1 and not ragged
        parts = [self._call(packed, piece, None, lse=not alone) for piece in seen]
        if ragged:
            parts.append(self._masked(packed, ragged, rows, lse=True))
        if alone:
            return parts[0]
        lses = [part.lse for part in parts if part.lse is not None]
        return Attended(*merge([part.out for part in parts], lses))

    def _masked(
        self, packed: Tensor, pieces: list[Piece], rows: Rows, *, lse: bool = False
    ) -> Attended:
        """One call under a mask of this block's rows and keys."""
        keys = [torch.arange(piece.start, piece.stop, device=packed.device) for piece in pieces]
        joined = pieces[0]
        if len(pieces) > 1:
            key = torch.cat([piece.key for piece in pieces], 1)
            joined = Piece(-1, key, torch.cat([piece.value for piece in pieces], 1))
        hidden = _hidden(torch.cat(keys)[None, :], rows.device[:, None], self._reach)
        found = self._call(packed, joined, hidden, lse=lse)
        if self._reach.span != 0:
            return found  # every row sees itself
        blind = hidden.all(-1).repeat(packed.shape[1] // len(rows))
        out = found.out.masked_fill(blind[None, :, None], 0)
        none = None if found.lse is None else found.lse.masked_fill(blind, float("-inf"))
        return Attended(out, none)

    def _call(
        self,
        packed: Float[Tensor, "kv_head row dim"],
        piece: Piece,
        hidden: Bool[Tensor, "own key"] | None,
        *,
        lse: bool,
    ) -> Attended:
        """One fused call; ``hidden`` is repeated for the packed group."""
        states = packed[None], piece.key[None], piece.value[None]
        bias = None if hidden is None else _bias(hidden, packed)
        if not lse and not self._return_lse:
            out = F.scaled_dot_product_attention(*states, attn_mask=bias, scale=self._scale)
            return Attended(out[0], None)
        if packed.device.type == "cpu":
            flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
            out, found = flash(*states, attn_mask=bias, scale=self._scale)
        else:
            bias = None if bias is None else bias.expand(1, len(packed), -1, -1)
            efficient = torch.ops.aten._scaled_dot_product_efficient_attention
            out, found = efficient(*states, bias, True, scale=self._scale)[:2]
        return Attended(out[0], found[0, :, : packed.shape[1]].float())


def _hidden(
    key: Int[Tensor, "1 key"], own: Int[Tensor, "row 1"], reach: Reach
) -> Bool[Tensor, "row key"]:
    hidden = key > own
    if reach.window is not None:
        hidden |= (key >= reach.sink) & (key <= own - reach.window)
    if reach.horizon is not None:
        hidden |= key <= own - reach.horizon
    return hidden


def _bias(hidden: Tensor, packed: Tensor) -> Float[Tensor, "1 1 row key"]:
    """Additive mask, repeated for the packed group; rows padded to 8 keys for fused GPU kernels."""
    num_rows, num_keys = hidden.shape
    bias = torch.zeros(num_rows, -(-num_keys // 8) * 8, dtype=packed.dtype, device=packed.device)
    bias[:, :num_keys].masked_fill_(hidden, float("-inf"))
    return bias.repeat(packed.shape[1] // num_rows, 1)[None, None, :, :num_keys]


def _between(pieces: list[Piece], start: int, stop: int) -> list[Piece]:
    """What of ``pieces`` lies at positions ``start`` to ``stop``."""
    cuts = []
    for piece in pieces:
        low, high = max(start, piece.start), min(stop, piece.stop)
        if low < high:
            part = slice(low - piece.start, high - piece.start)
            cuts.append(Piece(low, piece.key[:, part], piece.value[:, part]))
    return cuts


def _hides(rows: Rows, reach: Reach) -> bool:
    """Whether some row misses a key before it."""
    return reach.span is not None and rows.last >= reach.span
