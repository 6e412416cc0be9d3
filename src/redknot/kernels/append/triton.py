"""Append in Triton: rows of some streams at once, so that they share the angles in registers."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from redknot.kernels.paging import PagedKV

ROWS, STREAMS = 16, 8  # of one program; see benchmarks/kernels


@triton.jit(do_not_specialize=["num_streams", "num_rows", "row_streams", "table_stream"])
def _append(
    key_plane, value_plane, table, key, value, positions, cosine, sine, publish,
    num_streams, num_rows, row_streams,
    key_stream, key_row, value_stream, value_row, table_stream,
    MASKED: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr,
    BD: tl.constexpr, BR: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(1) * BR + tl.arange(0, BR)
    real = rows < num_rows
    dims = tl.arange(0, BD)
    turned = dims < 2 * HALF
    partner = tl.where(dims < HALF, dims + HALF, tl.where(turned, dims - HALF, dims))
    angle = tl.where(dims < HALF, dims, dims - HALF)
    placed = real[:, None] & turned[None, :]
    angles = rows[:, None] * HALF + angle[None, :]
    cos = tl.load(cosine + angles, mask=placed, other=1.0)
    sin = tl.load(sine + angles, mask=placed, other=0.0)
    sin = tl.where(dims[None, :] < HALF, -sin, sin)
    position = tl.load(positions + rows, mask=real, other=0).to(tl.int32)
    for step in tl.static_range(BS):
        stream = tl.program_id(0) * BS + step
        wanted = real & (stream < num_streams)
        if MASKED:
            published = tl.load(publish + stream * num_rows + rows, mask=wanted, other=0)
            wanted &= published != 0
        held = (stream + rows * row_streams).to(tl.int64) * table_stream
        pages = tl.load(table + held + position // PAGE, mask=wanted, other=-1).to(tl.int64)
        inside = (wanted & (pages >= 0))[:, None] & (dims < D)[None, :]
        where = (pages * PAGE + position % PAGE)[:, None] * D + dims[None, :]
        source = stream.to(tl.int64) * key_stream + rows.to(tl.int64) * key_row
        own = tl.load(key + source[:, None] + dims[None, :], mask=inside, other=0.0)
        other = tl.load(key + source[:, None] + partner[None, :], mask=inside, other=0.0)
        rotated = own.to(cos.dtype) * cos + other.to(cos.dtype) * sin
        tl.store(key_plane + where, rotated.to(key_plane.dtype.element_ty), mask=inside)
        source = stream.to(tl.int64) * value_stream + rows.to(tl.int64) * value_row
        state = tl.load(value + source[:, None] + dims[None, :], mask=inside, other=0.0)
        tl.store(value_plane + where, state.to(value_plane.dtype.element_ty), mask=inside)


def append(
    kv: PagedKV,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    cosine: Tensor,
    sine: Tensor,
    publish: Tensor | None,
    one_each: bool,
) -> None:
    """As `redknot.kernels.append.append`."""
    num_streams, num_rows, dim = key.shape
    if not num_rows:
        return
    mask = None if publish is None else publish.to(kv.table.device).view(torch.uint8).contiguous()
    _append[(triton.cdiv(num_streams, STREAMS), triton.cdiv(num_rows, ROWS))](
        kv.key, kv.value, kv.table, key, value, positions, cosine.contiguous(), sine.contiguous(),
        kv.table if mask is None else mask,
        num_streams, num_rows, kv.num_kv_heads if one_each else 0,
        key.stride(0), key.stride(1), value.stride(0), value.stride(1), kv.table.stride(0),
        MASKED=mask is not None, HALF=cosine.shape[1], PAGE=kv.page_size, D=dim,
        BD=triton.next_power_of_2(dim), BR=ROWS, BS=STREAMS, num_warps=4,
    )  # fmt: skip
