"""Sinks that a window no longer reaches, folded into the output of windowed attention."""

import triton
import triton.language as tl
from torch import Tensor

from redknot.kernels.attend.plan import UNLIMITED
from redknot.kernels.attend.rows import Reach
from redknot.kernels.attend.triton import INTERPRETED, LN2, LOG2E, product
from redknot.kernels.paging import PagedKV


@triton.jit
def _fold_sinks(
    query, key, value, table, out, lse, first, packed, span, sink, horizon, scale,
    query_head, query_row, query_member, out_head, out_row, out_member, table_stream, lse_head,
    lse_member,
    GROUP: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    start = tl.program_id(1) * BM
    last = first + (tl.minimum(start + BM, packed) - 1) // GROUP
    if last < span:
        return
    index = start + tl.arange(0, BM)
    real = index < packed
    row = index // GROUP
    member = index % GROUP
    position = first + row
    dims = tl.arange(0, BD)
    inside = real[:, None] & (dims < D)[None, :]
    place = head.to(tl.int64) * query_head + row.to(tl.int64) * query_row + member * query_member
    q = tl.load(query + place[:, None] + dims[None, :], mask=inside, other=0.0)
    place = head.to(tl.int64) * out_head + row.to(tl.int64) * out_row + member * out_member
    acc = tl.load(out + place[:, None] + dims[None, :], mask=inside, other=0.0).to(tl.float32)
    where = head.to(tl.int64) * lse_head + member.to(tl.int64) * lse_member + row
    known = tl.load(lse + where, mask=real, other=0.0)
    empty = (known == float("-inf")) | (known == float("inf"))
    peak = tl.where(empty, float("-inf"), known * LOG2E)
    total = tl.where(empty, 0.0, 1.0)
    acc = tl.where(empty[:, None], 0.0, acc)
    table += head.to(tl.int64) * table_stream
    scale *= LOG2E
    for low in range(0, tl.minimum(sink, last + 1), BN):
        keys = low + tl.arange(0, BN)
        held = keys < tl.minimum(sink, last + 1)
        pages = tl.load(table + keys // PAGE, mask=held, other=0).to(tl.int64)
        rows = (pages * PAGE + keys % PAGE) * D
        real_keys = held[:, None] & (dims < D)[None, :]
        k = tl.load(key + rows[:, None] + dims[None, :], mask=real_keys, other=0.0)
        v = tl.load(value + rows[:, None] + dims[None, :], mask=real_keys, other=0.0)
        seen = (keys[None, :] <= position[:, None] - span) & held[None, :]
        seen &= keys[None, :] > position[:, None] - horizon
        scores = tl.where(seen, product(q, tl.trans(k), INTERPRET) * scale, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.math.exp2(scores - safe[:, None])
        shrink = tl.math.exp2(peak - safe)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None] + product(weights.to(v.dtype), v, INTERPRET)
        peak = higher
    acc = acc / tl.where(total == 0, 1.0, total)[:, None]
    tl.store(out + place[:, None] + dims[None, :], acc.to(out.dtype.element_ty), mask=inside)
    found = tl.where(total == 0, float("-inf"), (peak + tl.math.log2(total)) * LN2)
    tl.store(lse + where, found, mask=real)


def fold_sinks(
    query: Tensor,
    kv: PagedKV,
    table: Tensor,
    first: int,
    reach: Reach,
    scale: float,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Add the keys before ``reach.sink`` that stand behind the window, in place.

    ``query`` and ``out`` are [stream, row, member, dim] for rows from position ``first`` on,
    ``lse`` [stream, member, row]; row by row as if all visible keys had been attended at once.
    """
    streams, rows, group, dim = query.shape
    height = 32 if INTERPRETED else 64
    span = reach.span or 0
    _fold_sinks[(streams, triton.cdiv(rows * group, height))](
        query, kv.key, kv.value, table, out, lse, first, rows * group, span, reach.sink,
        UNLIMITED if reach.horizon is None else reach.horizon, scale,
        query.stride(0), query.stride(1), query.stride(2),
        out.stride(0), out.stride(1), out.stride(2), table.stride(0),
        lse.stride(0), lse.stride(1),
        GROUP=group, PAGE=kv.page_size, D=dim, BD=triton.next_power_of_2(dim),
        BM=height, BN=16, INTERPRET=INTERPRETED, num_warps=4,
    )  # fmt: skip
