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


def retained_tokens(num_tokens: int, reach: Reach) -> Int[Tensor, "token"]:
    """Positions below ``num_tokens`` that the row at ``num_tokens`` or a later one may see."""
    sink, start = retained_bounds(num_tokens, reach)
    return torch.cat([torch.arange(sink), torch.arange(start, num_tokens)])


def retained_bounds(num_tokens: int, reach: Reach) -> tuple[int, int]:
    """How many first tokens stay, and the position where the kept tail begins."""
    limits = [limit for limit in (reach.window, reach.horizon) if limit is not None]
    start = max(0, num_tokens - min(limits) + 1) if limits else 0
    return (0 if reach.window is None else min(reach.sink, start), start)


def retained_share(num_tokens: int, reaches: list[tuple[Reach, ...]]) -> float:
    """Share of a prompt's K/V that decoding keeps, over ``reaches[layer][group]``."""
    kept = total = 0
    for layer in reaches:
        for reach in layer:
            sink, start = retained_bounds(num_tokens, reach)
            kept += sink + num_tokens - start
            total += num_tokens
    return kept / total
