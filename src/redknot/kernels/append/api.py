"""Meaning and dispatch of append: relocation and the write into pages in one pass."""

from typing import Literal

from jaxtyping import Bool, Float, Int
from torch import Tensor

from redknot.kernels.append import reference
from redknot.kernels.paging import PagedKV


def append(
    kv: PagedKV,
    key: Float[Tensor, "stream row dim"],
    value: Float[Tensor, "stream row dim"],
    positions: Int[Tensor, "row"],
    cosine: Float[Tensor, "row half"],
    sine: Float[Tensor, "row half"],
    *,
    publish: Bool[Tensor, "stream row"] | None = None,
    impl: Literal["auto", "torch", "triton"] = "auto",
) -> None:
    """Rotate un-rotated ``key`` to ``positions`` and write it and ``value`` into the pages.

    With ``half`` below ``dim / 2`` only the first ``2 * half`` dimensions turn. Rows go only where
    ``publish`` says so, and nowhere where their page is absent: nobody will see them. Rotation in
    the dtype of the angles, one rounding to that of the plane.
    """
    if key.shape != value.shape or key.shape[0] != kv.table.shape[0]:
        raise ValueError(
            f"keys {tuple(key.shape)}, values {tuple(value.shape)}, {kv.table.shape[0]} streams"
        )
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

        triton.append(kv, key, value, positions, cosine, sine, publish)
    else:
        reference.append(kv, key, value, positions, cosine, sine, publish)
