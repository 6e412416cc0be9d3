"""Counting and listing visible sets: the arithmetic behind FLOPs, memory and eviction."""

import torch
from jaxtyping import Int
from torch import Tensor

from redknot.kernels.attend import Reach


def visible_pairs(positions: Int[Tensor, "row"], reach: Reach) -> int:
    """Number of (row, key) pairs that ``reach`` shows."""
    p = positions.to(torch.int64)
    oldest = torch.zeros_like(p) if reach.horizon is None else (p - reach.horizon + 1).clamp(min=0)
    if reach.window is None:
        return int((p + 1 - oldest).sum())
    start = torch.maximum(p - reach.window + 1, oldest)
    sinks = (torch.minimum(start, torch.tensor(reach.sink)) - oldest).clamp(min=0)
    return int((p + 1 - start + sinks).sum())


def retained_share(num_tokens: int, reaches: list[tuple[Reach, ...]]) -> float:
    """Share of a prompt's K/V that decoding keeps, over ``reaches[layer][group]``."""
    kept = total = 0
    for layer in reaches:
        for reach in layer:
            spans = reach.spans(num_tokens)
            kept += sum(max(0, min(stop, num_tokens) - start) for start, stop in spans)
            total += num_tokens
    return kept / total
