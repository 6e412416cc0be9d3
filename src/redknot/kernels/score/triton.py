"""Column mass in Triton: a program reads its keys once and folds all rows of the probe."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from redknot.kernels.attend.plan import UNLIMITED
from redknot.kernels.attend.rows import Rows
from redknot.kernels.attend.triton import INTERPRETED, LOG2E, product
from redknot.kernels.paging import PagedKV


class Config(NamedTuple):
    """Keys of a program, packed rows of one step, and how it is run."""

    keys: int = 128
    rows: int = 64
    warps: int = 4
    stages: int = 2


@triton.jit
def _fold(
    found, k, keys, query, lse, positions, packed, horizon, scale,
    HIDES: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    BM: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Add the probabilities of ``keys`` for all packed rows, still apart by row of a step."""
    dims = tl.arange(0, BD)
    for start in range(0, packed, BM):
        index = start + tl.arange(0, BM)
        real = index < packed
        q = tl.load(
            query + index[:, None] * D + dims[None, :],
            mask=real[:, None] & (dims < D)[None, :], other=0.0,
        )  # fmt: skip
        peak = tl.load(lse + index, mask=real, other=float("inf"))
        scores = product(q, tl.trans(k), INTERPRET) * scale - (peak * LOG2E)[:, None]
        if HIDES:
            position = tl.load(positions + index // GROUP, mask=real, other=-1)
            seen = keys[None, :] <= position[:, None]
            seen &= keys[None, :] > position[:, None] - horizon
            scores = tl.where(seen, scores, float("-inf"))
        found += tl.math.exp2(scores)
    return found


@triton.jit(
    do_not_specialize=[
        "first_stream", "packed", "num_keys", "oldest", "horizon", "table_stream",
    ]
)  # fmt: skip
def _mass(
    query, key, table, lse, positions, mass,
    first_stream, packed, num_keys, oldest, horizon, scale, table_stream,
    GROUP: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr,
    BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Some keys of one KV head, read once, against all rows."""
    head = tl.program_id(1)
    start = oldest // BN * BN + tl.program_id(0) * BN
    keys = start + tl.arange(0, BN)
    dims = tl.arange(0, BD)
    held = (keys < num_keys) & (keys >= oldest)
    table += (first_stream + head).to(tl.int64) * table_stream
    pages = tl.load(table + keys // PAGE, mask=held, other=-1).to(tl.int64)
    held &= pages >= 0
    where = (pages * PAGE + keys % PAGE) * D
    inside = held[:, None] & (dims < D)[None, :]
    k = tl.load(key + where[:, None] + dims[None, :], mask=inside, other=0.0)
    query += head * packed * D
    lse += head * packed
    first = tl.load(positions)
    last = tl.load(positions + packed // GROUP - 1)
    scale *= LOG2E
    found = tl.zeros([BM, BN], tl.float32)
    if (start + BN > first + 1) | (start <= last - horizon):
        found = _fold(found, k, keys, query, lse, positions, packed, horizon, scale,
                      True, GROUP, D, BD, BM, INTERPRET)  # fmt: skip
    else:
        found = _fold(found, k, keys, query, lse, positions, packed, horizon, scale,
                      False, GROUP, D, BD, BM, INTERPRET)  # fmt: skip
    total = tl.where(held, tl.sum(found, 0) / packed, 0.0)
    tl.store(mass + head * num_keys + keys, total, mask=keys < num_keys)


def _config(dim: int, dtype: torch.dtype) -> Config:
    """What ran fastest on an H200; smaller where a row of a state is long, to fit shared memory."""
    wide = triton.next_power_of_2(dim) * dtype.itemsize > 512
    return Config(64, 32) if wide else Config()


def column_mass(
    query: Tensor,
    kv: PagedKV,
    rows: Rows,
    lse: Tensor,
    *,
    scale: float,
    horizon: int | None,
    request: int,
    config: Config | None = None,
) -> Tensor:
    """As `redknot.kernels.score.column_mass`."""
    config = config or _config(query.shape[2], query.dtype)
    heads, dim, num_keys = kv.num_kv_heads, query.shape[2], rows.last + 1
    group = query.shape[0] // heads
    packed = query.unflatten(0, (heads, group)).transpose(1, 2).contiguous()
    peaks = lse.float().unflatten(0, (heads, group)).transpose(1, 2).contiguous()
    oldest = 0 if horizon is None else max(0, rows.first - horizon + 1)
    make = torch.zeros if oldest else torch.empty
    mass = make(heads, num_keys, dtype=torch.float32, device=query.device)
    first = oldest // config.keys * config.keys
    _mass[(triton.cdiv(num_keys - first, config.keys), heads)](
        packed, kv.key, kv.table, peaks, rows.device.to(torch.int32), mass,
        request * heads, group * len(rows), num_keys, oldest,
        UNLIMITED if horizon is None else horizon, scale, kv.table.stride(0),
        GROUP=group, PAGE=kv.page_size, D=dim, BD=triton.next_power_of_2(dim),
        BM=config.rows, BN=config.keys, INTERPRET=INTERPRETED,
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    return mass
