"""Attention by a FlashAttention library over page tables: one call for each class of KV heads.

A KV head is a sequence of its own, so heads of one window share a call. What such a call cannot
express, the sinks behind a window and the ragged edge of gathered rows, is folded into its output
by a small kernel of ours.
"""

import itertools
from collections.abc import Iterator
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol, cast

import torch
from torch import Tensor

from redknot.kernels.attend.plan import AttendPlan, Part
from redknot.kernels.attend.rows import Reach
from redknot.kernels.paging import PagedKV

ROW_BLOCK = 256
"Gathered rows of a sequence: fewer leave the library less to do, more leave a wider ragged edge."
FEW_ROWS = 256
"Rows of one request that do not fill the device unless their keys are split."
TILE_ROWS, TILES = 128, 132
"Packed rows of a tile of FlashAttention-3, and the tiles that an H200 runs at once."


class Forward(Protocol):
    """Causal attention of sequences in pages, aligned at their ends."""

    def __call__(
        self,
        query: Tensor,  # [sequence, row, query_head, dim]
        kv: PagedKV,
        table: Tensor,  # [sequence, logical_page]
        tokens: Tensor,  # [sequence], keys
        window: int | None,
        scale: float,
        out: Tensor,
    ) -> Tensor:
        """Write ``out``; returns the log-sum-exp [sequence, query_head, row]."""


def installed() -> bool:
    """Whether a library that can run here was found."""
    return torch.cuda.is_available() and (_fa3_library() is not None or _has_fa4())


def attend(
    query: Tensor,
    kv: PagedKV,
    plan: AttendPlan,
    *,
    scale: float,
    return_lse: bool = False,
    forward: Forward | None = None,
) -> tuple[Tensor, Tensor | None]:
    """As `redknot.kernels.attend.attend`, for float16 and bfloat16."""
    if query.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"flash runs float16 and bfloat16, not {query.dtype}")
    call = _Call(query, kv, plan, scale, forward or library(), return_lse)
    for index in range(len(plan.parts)):
        call.run(index)
    return call.out.flatten(1), call.lse


class _Call:
    """Attention of all parts of a plan into one output."""

    def __init__(
        self, query: Tensor, kv: PagedKV, plan: AttendPlan, scale: float, forward: Forward,
        return_lse: bool,
    ) -> None:  # fmt: skip
        self._query, self._kv, self._plan = query, kv, plan
        self._scale, self._forward = scale, forward
        num_heads, num_rows, dim = query.shape
        self._group = num_heads // kv.num_kv_heads
        self._table = kv.table.clamp(min=0)  # a window's first block may reach into absent pages
        self.out = query.new_empty(num_rows, num_heads, dim)
        self.lse = query.new_empty(num_heads, num_rows, dtype=torch.float32) if return_lse else None

    def run(self, index: int) -> None:
        """One part: heads of one reach together."""
        part, rows = self._plan.parts[index], self._plan.rows_of(index)
        streams = part.request * self._kv.num_kv_heads
        for heads in _runs(part):
            reach = part.reaches[heads.start]
            members = slice(heads.start * self._group, heads.stop * self._group)
            query = self._query[members, rows].unflatten(0, (-1, self._group)).transpose(1, 2)
            out = self.out[rows, members].unflatten(1, (-1, self._group)).transpose(0, 1)
            table = self._table[streams + heads.start : streams + heads.stop]
            # FlashAttention-4 does not split keys on Hopper; our own kernel does.
            few = len(part.rows) <= FEW_ROWS and reach.span is None and self._forward is fa4
            if part.rows.consecutive and reach.span != 0 and not few:
                lse = self._consecutive(index, reach, table, query, out)
            elif reach.span is None and len(part.rows) > ROW_BLOCK:
                lse = self._gathered(index, table, query, out)
            else:
                lse = self._short(index, heads, table, query, out)
            if self.lse is not None:
                self.lse[members, rows] = lse.flatten(0, 1)

    def _consecutive(
        self, index: int, reach: Reach, table: Tensor, query: Tensor, out: Tensor
    ) -> Tensor:
        tokens = self._plan.lengths[index, : len(table)]
        lse = self._forward(query, self._kv, table, tokens, reach.span, self._scale, out)
        last = self._plan.parts[index].rows.last
        if reach.window is not None and reach.sink and last >= reach.window:
            from redknot.kernels.attend.fold_triton import fold_sinks

            positions = self._plan.positions[self._plan.rows_of(index)]
            fold_sinks(query, self._kv, table, positions, reach, self._scale, out, lse)
        return lse

    def _gathered(self, index: int, table: Tensor, query: Tensor, out: Tensor) -> Tensor:
        """Rows that see everything, in blocks that count as sequences.

        Row i of a block whose first row stands at p stands at p + i or later, so it sees all keys
        up to p + i: what causal attention of consecutive rows would show it. The rest is folded in.
        """
        from redknot.kernels.attend.fold_triton import fold_ragged

        positions = self._plan.positions[self._plan.rows_of(index)]
        count = len(positions)
        lse = query.new_empty(len(table), self._group, count, dtype=torch.float32)
        whole = count // ROW_BLOCK * ROW_BLOCK
        for start, stop, size in ((0, whole, ROW_BLOCK), (whole, count, count - whole)):
            if start == stop:
                continue
            tokens = positions[start:stop:size] + size
            for head in range(len(table)):
                q, o = (x[head, start:stop].unflatten(0, (-1, size)) for x in (query, out))
                pages = table[head].expand(len(tokens), -1)
                found = self._forward(q, self._kv, pages, tokens, None, self._scale, o)
                lse[head, :, start:stop] = found.transpose(0, 1).flatten(1)
        index_in = torch.arange(count, device=positions.device)
        step = index_in % ROW_BLOCK
        known = (positions[index_in - step] + step + 1).to(torch.int32)
        fold_ragged(query, self._kv, table, positions, known, self._scale, out, lse)
        return lse

    def _short(self, index: int, heads: range, table: Tensor, query: Tensor, out: Tensor) -> Tensor:
        """Gathered rows with a window, or few of them: packed tiles of our own kernel."""
        from redknot.kernels.attend import triton

        plan = self._plan.alone(index, heads)
        kv = PagedKV(self._kv.key, self._kv.value, table, len(heads))
        rows, target = query.transpose(1, 2).flatten(0, 1), out.transpose(0, 1).flatten(1, 2)
        _, lse = triton.attend(rows, kv, plan, scale=self._scale, return_lse=True, out=target)
        return cast(Tensor, lse).unflatten(0, (len(heads), -1))


def _runs(part: Part) -> Iterator[range]:
    """KV heads side by side that share a reach."""
    heads = range(len(part.reaches))
    for _, run in itertools.groupby(heads, key=lambda head: part.reaches[head]):
        members = list(run)
        yield range(members[0], members[-1] + 1)


@lru_cache
def library() -> Forward:
    """The library that is installed; ImportError where there is none."""
    if _has_fa4():  # a few per cent ahead of FlashAttention-3 on an H200
        return fa4
    path = _fa3_library()
    if path is not None:
        if not hasattr(torch.ops._vllm_fa3_C, "fwd"):
            torch.ops.load_library(str(path))
        return fa3
    raise ImportError("flash needs flash-attn-4 or the FlashAttention-3 that comes with vLLM")


def fa3(
    query: Tensor,
    kv: PagedKV,
    table: Tensor,
    tokens: Tensor,
    window: int | None,
    scale: float,
    out: Tensor,
) -> Tensor:
    """FlashAttention-3 (Shah et al. 2024) as vLLM builds it."""
    found = torch.ops._vllm_fa3_C.fwd(
        query, kv.key[:, :, None], kv.value[:, :, None],
        k_new=None, v_new=None, q_v=None, out=out,
        cu_seqlens_q=None, cu_seqlens_k=None, cu_seqlens_k_new=None,
        seqused_q=None, seqused_k=tokens,
        max_seqlen_q=query.shape[1], max_seqlen_k=table.shape[1] * kv.page_size,
        page_table=table, kv_batch_idx=None, leftpad_k=None,
        rotary_cos=None, rotary_sin=None, seqlens_rotary=None,
        q_descale=None, k_descale=None, v_descale=None,
        softmax_scale=scale, is_causal=True,
        window_size_left=-1 if window is None else window - 1,
        window_size_right=-1 if window is None else 0,
        softcap=0.0, is_rotary_interleaved=True, scheduler_metadata=None,
        num_splits=_splits(query, table, kv, window), pack_gqa=None, sm_margin=0,
        s_aux=None, cp_world_size=1, cp_rank=0, cp_tot_seqused_k=None,
    )  # fmt: skip
    return found[1]


def fa4(
    query: Tensor,
    kv: PagedKV,
    table: Tensor,
    tokens: Tensor,
    window: int | None,
    scale: float,
    out: Tensor,
) -> Tensor:
    """FlashAttention-4 (the CuTe DSL package `flash-attn-4`)."""
    from flash_attn.cute.interface import _flash_attn_fwd

    found = _flash_attn_fwd(
        query, kv.key[:, :, None], kv.value[:, :, None],
        seqused_k=tokens, page_table=table, softmax_scale=scale, causal=window is None,
        window_size_left=None if window is None else window - 1,
        window_size_right=None if window is None else 0,
        out=out, return_lse=True,
    )  # fmt: skip
    return found[1]


def _splits(query: Tensor, table: Tensor, kv: PagedKV, window: int | None) -> int:
    """Parts of the keys of each tile: more than one where few rows see many keys."""
    sequences, rows, group, _ = query.shape
    tiles = sequences * -(-rows * group // TILE_ROWS)
    if window is not None or rows > FEW_ROWS:
        return 1
    return max(1, min(TILES // tiles, table.shape[1] * kv.page_size // 1024))


@lru_cache
def _fa3_library() -> Path | None:
    spec = find_spec("vllm")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    for place in places:
        for path in Path(place, "vllm_flash_attn").glob("_vllm_fa3_C*.so"):
            return path
    return None


@lru_cache
def _has_fa4() -> bool:
    return find_spec("flash_attn") is not None and find_spec("flash_attn.cute") is not None
