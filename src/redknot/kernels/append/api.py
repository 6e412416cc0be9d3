"""Meaning and dispatch of append: relocation and the write into pages in one pass."""

from typing import Literal

from jaxtyping import Bool, Float, Int
from torch import Tensor

from redknot.kernels.append import reference
from redknot.kernels.paging import PagedKV


def append(  # noqa: PLR0913  what is written, where to, and how: nothing of it goes together
    kv: PagedKV,
    key: Float[Tensor, "stream row dim"],
    value: Float[Tensor, "stream row dim"],
    positions: Int[Tensor, "row"],
    cosine: Float[Tensor, "row half"],
    sine: Float[Tensor, "row half"],
    *,
    publish: Bool[Tensor, "stream row"] | None = None,
    one_each: bool = False,
    impl: Literal["auto", "torch", "triton"] = "auto",
) -> None:
    """Rotate un-rotated ``key`` to ``positions`` and write it and ``value`` into the pages.

    With ``half`` below ``dim / 2`` only the first ``2 * half`` dimensions turn. Rows go only where
    ``publish`` says so, and nowhere where their page is absent: nobody will see them. Rotation in
    the dtype of the angles, one rounding to that of the plane.

    With ``one_each`` row r is that of request r: keys, values and ``publish`` are [kv_head,
    request, ...], and every request has its own position, which the table must have a column for
    even where the page is absent.
    """
    num_streams = kv.num_kv_heads if one_each else kv.table.shape[0]
    if key.shape != value.shape or key.shape[0] != num_streams:
        kind = "KV heads" if one_each else "streams"
        raise ValueError(
            f"keys {tuple(key.shape)}, values {tuple(value.shape)}, {num_streams} {kind}"
        )
    if one_each and key.shape[1] != kv.num_requests:
        raise ValueError(f"{key.shape[1]} rows, one each of {kv.num_requests} requests")
    if not key.shape[1] == len(positions) == len(cosine) == len(sine):
        raise ValueError(
            f"{key.shape[1]} rows at {len(positions)} positions and {len(cosine)} angles"
        )
    if key.shape[-1] < 2 * cosine.shape[-1]:
        raise ValueError(f"dim {key.shape[-1]} is below twice the {cosine.shape[-1]} angles")
    if impl not in ("auto", "torch", "triton"):
        raise ValueError(f"unknown implementation {impl!r}")
    if impl == "triton" or (impl == "auto" and key.is_cuda):
        from redknot.kernels.append import triton

        triton.append(kv, key, value, positions, cosine, sine, publish, one_each)
    else:
        reference.append(kv, key, value, positions, cosine, sine, publish, one_each)
