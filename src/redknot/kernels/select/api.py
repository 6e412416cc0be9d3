"""Top-k with compaction: indices of the highest scores in ascending order, without the host."""

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def select_top(
    scores: Float[Tensor, "token"],
    count: int,
    among: Bool[Tensor, "token"] | None = None,
    *,
    impl: Literal["auto", "torch", "triton"] = "auto",
) -> Int[Tensor, "count"]:
    """The ``count`` tokens that score highest, ascending; of equal scores the first ones win.

    Only tokens ``among`` are chosen; there must be ``count`` of them, which only the caller can
    know without waiting for the device. NaN ranks lowest.
    """
    if not 0 <= count <= len(scores):
        raise ValueError(f"{count} of {len(scores)} tokens")
    if among is not None and among.shape != scores.shape:
        raise ValueError(f"candidates {tuple(among.shape)} for scores {tuple(scores.shape)}")
    if count == 0:
        return torch.zeros(0, dtype=torch.int64, device=scores.device)
    single = scores.dtype != torch.float64
    if impl == "triton" and not single:
        raise ValueError("triton ranks float32 and shorter scores, not float64")
    if impl not in ("auto", "torch", "triton"):
        raise ValueError(f"unknown implementation {impl!r}")
    if impl == "triton" or (impl == "auto" and scores.is_cuda and single):
        from redknot.kernels.select import triton

        return triton.select_top(scores, count, among)
    empty = scores.isnan()
    order = torch.sort(
        scores.masked_fill(empty, float("-inf")), descending=True, stable=True
    ).indices
    order = torch.cat([order[~empty[order]], order[empty[order]]])
    if among is not None:
        order = order[among[order]]
    return order[:count].sort().values
