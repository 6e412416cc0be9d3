"""Attention by a FlashAttention library over page tables: one call for each class of KV heads.

A KV head is a sequence of its own, so heads of one window share a call; the sinks that a window no
longer reaches are folded into its output by a small kernel of ours.
"""

import itertools
from collections.abc import Iterator
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from redknot.kernels.attend.plan import AttendPlan, Part
from redknot.kernels.paging import PagedKV


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
    """As `redknot.kernels.attend.attend`, for consecutive rows and float16 or bfloat16."""
    if query.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"flash runs float16 and bfloat16, not {query.dtype}")
    forward = forward or library()
    num_heads, num_rows, dim = query.shape
    group = num_heads // kv.num_kv_heads
    out = query.new_empty(num_rows, num_heads, dim)
    lse = query.new_empty(num_heads, num_rows, dtype=torch.float32) if return_lse else None
    table = kv.table.clamp(min=0)  # an absent page may stand in the block where a window begins
    first = 0
    for index, part in enumerate(plan.parts):
        if not part.rows.consecutive:
            raise ValueError("flash takes consecutive rows")
        rows = slice(first, first + len(part.rows))
        for heads in _runs(part):
            members = slice(heads.start * group, heads.stop * group)
            reach = part.reaches[heads.start]
            q = query[members, rows].unflatten(0, (-1, group)).transpose(1, 2)
            target = out[rows, members].unflatten(1, (-1, group)).transpose(0, 1)
            streams = slice(
                *(part.request * kv.num_kv_heads + h for h in (heads.start, heads.stop))
            )
            tokens = plan.lengths[index, : len(heads)]
            found = forward(q, kv, table[streams], tokens, reach.span, scale, target)
            if reach.window is not None and reach.sink and part.rows.last >= reach.window:
                from redknot.kernels.attend.sinks import fold_sinks

                fold_sinks(q, kv, table[streams], part.rows.first, reach, scale, target, found)
            if lse is not None:
                lse[members, rows] = found.flatten(0, 1)
        first = rows.stop
    return out.flatten(1), lse


def _runs(part: Part) -> Iterator[range]:
    """KV heads side by side that share a reach."""
    heads = range(len(part.reaches))
    for _, run in itertools.groupby(heads, key=lambda head: part.reaches[head]):
        members = list(run)
        yield range(members[0], members[-1] + 1)


@lru_cache
def library() -> Forward:
    """The library that is installed; ImportError where there is none."""
    path = _fa3_library()
    if path is not None:
        if not hasattr(torch.ops._vllm_fa3_C, "fwd"):
            torch.ops.load_library(str(path))
        return fa3
    if _has_fa4():
        return fa4
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
        num_splits=1, pack_gqa=None, sm_margin=0,
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
