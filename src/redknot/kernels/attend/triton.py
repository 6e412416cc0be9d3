"""Attention over page tables in Triton: one tile of packed query rows at a time, longest first."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from redknot.kernels.attend.join_triton import join_splits
from redknot.kernels.attend.plan import AttendPlan
from redknot.kernels.paging import PagedKV

LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)
SLOTS = 132 * 2
"Tiles that an H200 runs at once."
INTERPRETED = triton.knobs.runtime.interpret


class Config(NamedTuple):
    """Shape of a tile and how it is run."""

    rows: int = 64  # packed rows of a tile
    keys: int = 64  # keys of one step
    warps: int = 4
    stages: int = 3
    splits: int = 0  # of the keys of a tile; 0 decides by the number of tiles
    wide: int = 2  # steps of a middle that gets a loop of its own
    bulk: bool = True  # read whole steps with the bulk copy engine where a page holds them


@triton.jit
def product(a, b, INTERPRET: tl.constexpr):
    if INTERPRET:  # the interpreter multiplies bfloat16 wrongly
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _page_rows(table, first, keys, valid, PAGE: tl.constexpr, BN: tl.constexpr):
    """Row of the plane (page * PAGE + offset) of each key, int64; one page where a step fits in."""
    if PAGE % BN == 0:
        page = tl.load(table + first // PAGE).to(tl.int64)
        return page * PAGE + (first % PAGE + tl.arange(0, BN)), valid & (page >= 0)
    pages = tl.load(table + keys // PAGE, mask=valid, other=-1).to(tl.int64)
    return pages * PAGE + keys % PAGE, valid & (pages >= 0)


@triton.jit
def _edges(
    acc, peak, total, q, position, oldest, sink_low, sink_steps, low, stop,
    key, value, key_bulk, value_bulk, table, window, sink, horizon, scale,
    BULK: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr,
    BD: tl.constexpr, BN: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Online softmax over steps where some row misses a key: the sinks, then ``low`` to ``stop``.

    Keys at or past ``stop``, and those that the ``oldest`` row no longer sees, nobody in the tile
    sees. A bulk read takes them along, so what a plane holds must be finite.
    """
    dims = tl.arange(0, BD)
    steps = sink_steps + tl.cdiv(stop - low, BN)
    first = tl.where(sink_steps > 0, sink_low, low)
    page = tl.load(table + first // PAGE, mask=steps > 0, other=0)
    for step in range(steps):
        first = tl.where(step < sink_steps, sink_low, low - sink_steps * BN) + step * BN
        keys = first + tl.arange(0, BN)
        if BULK:
            row = page * PAGE + first % PAGE
            k = key_bulk.load([row, 0])
            v = value_bulk.load([row, 0])
            # The page of the next step, so that its address does not wait for the table.
            later = tl.where(step + 1 < sink_steps, sink_low, low - sink_steps * BN)
            later += (step + 1) * BN
            page = tl.load(table + later // PAGE, mask=step + 1 < steps, other=0)
        else:
            valid = (keys > oldest - window) | (keys < sink)
            valid &= (keys > oldest - horizon) & (keys < stop)
            where, valid = _page_rows(table, first, keys, valid, PAGE, BN)
            inside = valid[:, None] & (dims < D)[None, :]
            k = tl.load(key + where[:, None] * D + dims[None, :], mask=inside, other=0.0)
            v = tl.load(value + where[:, None] * D + dims[None, :], mask=inside, other=0.0)
        seen = (keys[None, :] > position[:, None] - window) | (keys[None, :] < sink)
        seen &= keys[None, :] > position[:, None] - horizon
        seen &= keys[None, :] <= position[:, None]
        scores = tl.where(seen, product(q, tl.trans(k), INTERPRET), float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1) * scale)
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.math.exp2(scores * scale - safe[:, None])
        shrink = tl.math.exp2(peak - safe)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None] + product(weights.to(v.dtype), v, INTERPRET)
        peak = higher
    return acc, peak, total


@triton.jit
def _full(
    acc, peak, total, q, start, stop,
    key, value, key_bulk, value_bulk, table, scale,
    BULK: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr,
    BD: tl.constexpr, BN: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Online softmax over steps where every row sees every key."""
    dims = tl.arange(0, BD)
    page = tl.load(table + start // PAGE, mask=start < stop, other=0)
    for first in range(start, stop, BN):
        if BULK:
            row = page * PAGE + first % PAGE
            k = key_bulk.load([row, 0])
            v = value_bulk.load([row, 0])
            # The page of the next step, ahead: 5.3 ms against 6.4 at 32K on an H200.
            page = tl.load(table + (first + BN) // PAGE, mask=first + BN < stop, other=0)
        else:
            keys = first + tl.arange(0, BN)
            where, _ = _page_rows(table, first, keys, keys >= 0, PAGE, BN)
            if D == BD:
                k = tl.load(key + where[:, None] * D + dims[None, :])
                v = tl.load(value + where[:, None] * D + dims[None, :])
            else:
                inside = (dims < D)[None, :]
                k = tl.load(key + where[:, None] * D + dims[None, :], mask=inside, other=0.0)
                v = tl.load(value + where[:, None] * D + dims[None, :], mask=inside, other=0.0)
        scores = product(q, tl.trans(k), INTERPRET)
        higher = tl.maximum(peak, tl.max(scores, 1) * scale)
        weights = tl.math.exp2(scores * scale - higher[:, None])
        shrink = tl.math.exp2(peak - higher)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None] + product(weights.to(v.dtype), v, INTERPRET)
        peak = higher
    return acc, peak, total


@triton.jit(do_not_specialize=["table_stream", "lse_head"])
def _attend(
    query, key, value, key_bulk, value_bulk, table, out, lse, partial, partial_lse,
    positions, parts, reaches, work, scale,
    query_head, query_row, out_head, out_row, table_stream, lse_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr,
    BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    WANTS_LSE: tl.constexpr, BULK: tl.constexpr, SPLIT: tl.constexpr,
    WIDE: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    split = tl.program_id(1)
    splits = tl.num_programs(1)
    part = tl.load(work + tile * 3)
    head = tl.load(work + tile * 3 + 1)
    start = tl.load(work + tile * 3 + 2)
    row_start = tl.load(parts + part * 3)
    packed = tl.load(parts + part * 3 + 1) * GROUP
    request = tl.load(parts + part * 3 + 2)
    window = tl.load(reaches + (part * HEADS + head) * 3)
    sink = tl.load(reaches + (part * HEADS + head) * 3 + 1)
    horizon = tl.load(reaches + (part * HEADS + head) * 3 + 2)

    index = start + tl.arange(0, BM)
    real = index < packed
    row = row_start + index // GROUP
    heads = head * GROUP + index % GROUP
    position = tl.load(positions + row, mask=real, other=-1)
    first = tl.load(positions + row_start + start // GROUP)
    last = tl.load(positions + row_start + (tl.minimum(start + BM, packed) - 1) // GROUP)

    dims = tl.arange(0, BD)
    inside = real[:, None] & (dims < D)[None, :]
    place = heads.to(tl.int64) * query_head + row.to(tl.int64) * query_row
    q = tl.load(query + place[:, None] + dims[None, :], mask=inside, other=0.0)
    scale *= LOG2E
    table += (request * HEADS + head).to(tl.int64) * table_stream

    # Keys in order: sinks that no window reaches, the ragged left edge of the windows, what every
    # row sees, the causal edge. A short middle is not worth a loop of its own.
    span = tl.minimum(window, horizon)
    stop = last + 1
    low = tl.maximum(first - span + 1, 0) // BN * BN
    sink_low = tl.maximum(first - horizon + 1, 0) // BN * BN
    sink_steps = tl.cdiv(tl.maximum(tl.minimum(sink, low) - sink_low, 0), BN)
    full_start = tl.maximum(tl.cdiv(tl.maximum(last - span + 1, 0), BN) * BN, low)
    full_stop = (first + 1) // BN * BN
    wide = full_stop - full_start >= WIDE * BN
    edge = tl.where(wide, full_start, stop)
    rest = tl.where(wide, full_stop, stop)
    if SPLIT:
        steps = tl.cdiv(tl.cdiv(stop - low, BN), splits) * BN
        begin = low + split * steps
        end = tl.minimum(begin + steps, stop)
        sink_steps = tl.where(split == 0, sink_steps, 0)
        edge = tl.minimum(tl.maximum(edge, begin), end)
        rest = tl.minimum(tl.maximum(rest, edge), end)
        low = tl.minimum(begin, end)  # a split behind the last key has no steps
        stop = end

    acc = tl.zeros([BM, BD], tl.float32)
    peak = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc, peak, total = _edges(
        acc, peak, total, q, position, first, sink_low, sink_steps, low, edge,
        key, value, key_bulk, value_bulk, table, window, sink, horizon, scale,
        BULK, PAGE, D, BD, BN, INTERPRET)  # fmt: skip
    acc, peak, total = _full(
        acc, peak, total, q, edge, rest, key, value, key_bulk, value_bulk, table, scale,
        BULK, PAGE, D, BD, BN, INTERPRET)  # fmt: skip
    acc, peak, total = _edges(
        acc, peak, total, q, position, first, 0, 0, rest, stop,
        key, value, key_bulk, value_bulk, table, window, sink, horizon, scale,
        BULK, PAGE, D, BD, BN, INTERPRET)  # fmt: skip

    acc = acc / tl.where(total == 0, 1.0, total)[:, None]
    found = tl.where(total == 0, float("-inf"), (peak + tl.math.log2(total)) * LN2)
    if SPLIT:
        place = (tile.to(tl.int64) * splits + split) * BM + tl.arange(0, BM)
        tl.store(partial + place[:, None] * D + dims[None, :], acc, mask=inside)
        tl.store(partial_lse + place, found, mask=real)
    else:
        place = heads.to(tl.int64) * out_head + row.to(tl.int64) * out_row
        tl.store(out + place[:, None] + dims[None, :], acc.to(out.dtype.element_ty), mask=inside)
        if WANTS_LSE:
            tl.store(lse + heads * lse_head + row, found, mask=real)


def attend(
    query: Tensor,
    kv: PagedKV,
    plan: AttendPlan,
    *,
    scale: float,
    config: Config | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """As `redknot.kernels.attend.attend`; may write ``out`` [row, query_head, dim]."""
    num_heads, num_rows, dim = query.shape
    group = num_heads // kv.num_kv_heads
    config = config or _config(dim, query.dtype)
    if out is None:
        out = torch.empty(num_rows, num_heads, dim, dtype=query.dtype, device=query.device)
    lse = query.new_empty(num_heads, num_rows, dtype=torch.float32) if return_lse else out
    tiles = plan.tiles(group, config.rows)
    splits = config.splits or _splits(plan, len(tiles.work))
    shape = (len(tiles.work) * splits, config.rows) if splits > 1 else (0, config.rows)
    partial = query.new_empty(*shape, dim, dtype=torch.float32)
    partial_lse = query.new_empty(*shape, dtype=torch.float32)
    bulk = config.bulk and kv.page_size % config.keys == 0 and dim in (64, 128, 256)
    planes = [_bulk(plane, config.keys) if bulk else plane for plane in (kv.key, kv.value)]
    width = triton.next_power_of_2(dim)
    _attend[(len(tiles.work), splits)](
        query, kv.key, kv.value, *planes, kv.table, out, lse, partial, partial_lse,
        tiles.positions, tiles.parts, tiles.reaches, tiles.work, scale,
        query.stride(0), query.stride(1), out.stride(1), out.stride(0), kv.table.stride(0),
        num_rows,
        HEADS=kv.num_kv_heads, GROUP=group, PAGE=kv.page_size, D=dim, BD=width, BM=config.rows,
        BN=config.keys, WANTS_LSE=return_lse, BULK=bulk, SPLIT=splits > 1,
        WIDE=config.wide, INTERPRET=INTERPRETED,
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    if splits > 1:
        join_splits[(len(tiles.work), config.rows // 8)](
            out, lse, partial, partial_lse, tiles.parts, tiles.work, splits,
            out.stride(1), out.stride(0), num_rows,
            GROUP=group, D=dim, BD=width, BM=config.rows, BR=8, WANTS_LSE=return_lse, num_warps=2,
        )  # fmt: skip
    return out.flatten(1), lse if return_lse else None


def _splits(plan: AttendPlan, tiles: int) -> int:
    """Parts of the keys of every tile: more than one where tiles alone do not fill the device.

    Short tiles beside long ones do not fill it either.
    """
    if tiles >= SLOTS:
        return 1
    tokens = max(part.rows.last for part in plan.parts) + 1
    return max(1, min(int(SLOTS / max(1.0, tiles * plan.fullness)), tokens // 1024))


def _bulk(plane: Tensor, keys: int) -> TensorDescriptor:
    """A pool's plane as rows of tokens, read ``keys`` at a time by the bulk copy engine."""
    rows = plane.view(-1, plane.shape[-1])
    return TensorDescriptor.from_tensor(rows, [keys, plane.shape[-1]])


def _config(dim: int, dtype: torch.dtype) -> Config:
    """What ran fastest on an H200; float32 tiles are smaller to fit shared memory."""
    if INTERPRETED:
        return Config(32, 32)
    if dtype == torch.float32:
        return Config(64, 32, 4, 2)
    return Config(128, 64, 8, 2) if dim > 128 else Config()
