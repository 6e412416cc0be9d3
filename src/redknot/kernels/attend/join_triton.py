"""Splits of the keys of one tile of rows, merged by log-sum-exp."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["splits", "lse_head"])
def join_splits(
    out, lse, partial, partial_lse, parts, work, splits, out_head, out_row, lse_head,
    GROUP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr,
    WANTS_LSE: tl.constexpr,
):  # fmt: skip
    """Merge the splits of some rows of one tile by log-sum-exp."""
    tile = tl.program_id(0)
    part = tl.load(work + tile * 3)
    head = tl.load(work + tile * 3 + 1)
    start = tl.load(work + tile * 3 + 2)
    row_start = tl.load(parts + part * 3)
    packed = tl.load(parts + part * 3 + 1) * GROUP
    member = tl.program_id(1) * BR + tl.arange(0, BR)
    index = start + member
    real = index < packed
    dims = tl.arange(0, BD)
    acc = tl.zeros([BR, BD], tl.float32)
    peak = tl.full([BR], float("-inf"), tl.float32)
    total = tl.zeros([BR], tl.float32)
    for split in range(splits):
        place = (tile.to(tl.int64) * splits + split) * BM + member
        one = tl.load(partial_lse + place, mask=real, other=float("-inf"))
        higher = tl.maximum(peak, one)
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp(one - safe)
        shrink = tl.exp(peak - safe)
        inside = (weight > 0)[:, None] & (dims < D)[None, :]
        piece = tl.load(partial + place[:, None] * D + dims[None, :], mask=inside, other=0.0)
        acc = acc * shrink[:, None] + piece * weight[:, None]
        total = total * shrink + weight
        peak = higher
    acc = acc / tl.where(total == 0, 1.0, total)[:, None]
    row = row_start + index // GROUP
    heads = head * GROUP + index % GROUP
    place = heads.to(tl.int64) * out_head + row.to(tl.int64) * out_row
    inside = real[:, None] & (dims < D)[None, :]
    tl.store(out + place[:, None] + dims[None, :], acc.to(out.dtype.element_ty), mask=inside)
    if WANTS_LSE:
        found = tl.where(total == 0, float("-inf"), peak + tl.log(total))
        tl.store(lse + heads * lse_head + row, found, mask=real)
