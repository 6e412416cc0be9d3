"""More keys folded into attention that is done: what a library's call cannot reach itself."""

import triton
import triton.language as tl
from torch import Tensor

from redknot.kernels.attend.plan import UNLIMITED
from redknot.kernels.attend.rows import Reach
from redknot.kernels.attend.triton import INTERPRETED, LN2, LOG2E, product
from redknot.kernels.paging import PagedKV

BEYOND = tl.constexpr(UNLIMITED)


@triton.jit(
    do_not_specialize=[
        "packed", "span", "sink", "horizon", "table_stream", "lse_head", "lse_member",
    ],
    # What a call gets of these tables begins anywhere.
    do_not_specialize_on_alignment=["table", "positions", "known"],
)  # fmt: skip
def _fold(
    query, key, value, table, out, lse, positions, known, packed, span, sink, horizon, scale,
    query_head, query_row, query_member, out_head, out_row, out_member, table_stream, lse_head,
    lse_member,
    RAGGED: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr,
    BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Keys of [low, high] of each row, all of them as yet unseen.

    RAGGED: from ``known`` to the row itself. Otherwise the sinks that stand behind the window.
    """
    head = tl.program_id(0)
    start = tl.program_id(1) * BM
    index = start + tl.arange(0, BM)
    real = index < packed
    row = index // GROUP
    member = index % GROUP
    final = (tl.minimum(start + BM, packed) - 1) // GROUP
    position = tl.load(positions + row, mask=real, other=-1)
    last = tl.load(positions + final)
    if RAGGED:
        low = tl.load(known + row, mask=real, other=BEYOND)
        high = position
        begin = tl.load(known + start // GROUP)
        stop = last + 1
    else:
        low = position - horizon + 1
        high = tl.minimum(position - span, sink - 1)
        begin = tl.maximum(tl.load(positions + start // GROUP) - horizon + 1, 0)
        stop = tl.minimum(sink, last - span + 1)
    if stop <= begin:
        return
    dims = tl.arange(0, BD)
    inside = real[:, None] & (dims < D)[None, :]
    place = head.to(tl.int64) * query_head + row.to(tl.int64) * query_row + member * query_member
    q = tl.load(query + place[:, None] + dims[None, :], mask=inside, other=0.0)
    place = head.to(tl.int64) * out_head + row.to(tl.int64) * out_row + member * out_member
    acc = tl.load(out + place[:, None] + dims[None, :], mask=inside, other=0.0).to(tl.float32)
    where = head.to(tl.int64) * lse_head + member.to(tl.int64) * lse_member + row
    done = tl.load(lse + where, mask=real, other=0.0)
    empty = (done == float("-inf")) | (done == float("inf"))
    peak = tl.where(empty, float("-inf"), done * LOG2E)
    total = tl.where(empty, 0.0, 1.0)
    acc = tl.where(empty[:, None], 0.0, acc)
    table += head.to(tl.int64) * table_stream
    scale *= LOG2E
    for first in range(begin, stop, BN):
        keys = first + tl.arange(0, BN)
        held = keys < stop
        pages = tl.load(table + keys // PAGE, mask=held, other=0).to(tl.int64)
        rows = (pages * PAGE + keys % PAGE) * D
        read = held[:, None] & (dims < D)[None, :]
        k = tl.load(key + rows[:, None] + dims[None, :], mask=read, other=0.0)
        v = tl.load(value + rows[:, None] + dims[None, :], mask=read, other=0.0)
        seen = (keys[None, :] >= low[:, None]) & (keys[None, :] <= high[:, None])
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
    query: Tensor, kv: PagedKV, table: Tensor, positions: Tensor, reach: Reach, scale: float,
    out: Tensor, lse: Tensor,
) -> None:  # fmt: skip
    """Add the keys before ``reach.sink`` that stand behind the window, in place.

    ``query`` and ``out`` are [stream, row, member, dim] of rows at ``positions`` (int32), ``lse``
    is [stream, member, row]; row by row as if all visible keys had been attended at once.
    """
    horizon = UNLIMITED if reach.horizon is None else reach.horizon
    limits = (reach.span or 0, reach.sink, horizon)
    _launch(query, kv, table, positions, positions, limits, scale, out, lse, ragged=False)


def fold_ragged(
    query: Tensor, kv: PagedKV, table: Tensor, positions: Tensor, known: Tensor, scale: float,
    out: Tensor, lse: Tensor,
) -> None:  # fmt: skip
    """Add the keys from ``known`` (int32, ascending) to the row itself; else as `fold_sinks`."""
    _launch(query, kv, table, positions, known, (0, 0, 0), scale, out, lse, ragged=True)


def _launch(
    query: Tensor, kv: PagedKV, table: Tensor, positions: Tensor, known: Tensor,
    limits: tuple[int, int, int], scale: float, out: Tensor, lse: Tensor, *, ragged: bool,
) -> None:  # fmt: skip
    streams, rows, group, dim = query.shape
    height = 32 if INTERPRETED else 64
    _fold[(streams, triton.cdiv(rows * group, height))](
        query, kv.key, kv.value, table, out, lse, positions, known, rows * group, *limits, scale,
        query.stride(0), query.stride(1), query.stride(2),
        out.stride(0), out.stride(1), out.stride(2), table.stride(0),
        lse.stride(0), lse.stride(1),
        RAGGED=ragged, GROUP=group, PAGE=kv.page_size, D=dim, BD=triton.next_power_of_2(dim),
        BM=height, BN=(32 if INTERPRETED else 64) if ragged else 16, INTERPRET=INTERPRETED,
        num_warps=4,
    )  # fmt: skip
