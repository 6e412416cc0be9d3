"""Content-defined chunking of token ids: spans for prompts that come without hints.

Borders depend on the tokens beside them alone, so a text keeps its borders wherever it stands
(Muthitacharoen et al. 2001, LBFS; gear hash of Xia et al. 2016, FastCDC).
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

WIDTH = 16  # tokens that a border depends on


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSizes:
    """Lengths of chunks, in tokens."""

    smallest: int = 64
    average: int = 256
    largest: int = 1024

    def __post_init__(self) -> None:
        if not WIDTH <= self.smallest <= self.average <= self.largest:
            raise ValueError(f"chunk sizes must grow from {WIDTH}: {self}")


def chunk(
    token_ids: Int[Tensor, "token"],
    sizes: ChunkSizes = ChunkSizes(),
) -> list[tuple[int, int]]:
    """Cut ``token_ids`` into chunks; what follows the last border is no chunk.

    The remainder would change with whatever is appended, so it could never be found again.
    """
    borders = _border_candidates(token_ids, sizes.average - sizes.smallest)
    chunks, start = [], 0
    while len(token_ids) - start >= sizes.smallest:
        later = borders[np.searchsorted(borders, start + sizes.smallest) :]
        stop = int(later[0]) if len(later) else len(token_ids) + 1
        stop = min(stop, start + sizes.largest)
        if stop > len(token_ids):
            break
        chunks.append((start, stop))
        start = stop
    return chunks


def _border_candidates(token_ids: Int[Tensor, "token"], mean_gap: int) -> np.ndarray:
    """Positions before which a border may stand: one in ``mean_gap`` on average."""
    if len(token_ids) < WIDTH:
        return np.empty(0, dtype=np.int64)
    mixed = token_ids.to(torch.int64).numpy().astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    rolling = np.zeros(len(mixed), dtype=np.uint64)
    for age in range(WIDTH):  # a gear hash: each older token is shifted once more
        rolling[WIDTH - 1 :] += mixed[WIDTH - 1 - age : len(mixed) - age] << np.uint64(age)
    rolling ^= rolling >> np.uint64(32)
    hits = (rolling * np.uint64(0x94D049BB133111EB)) >> np.uint64(40)
    chosen = np.flatnonzero(hits < (1 << 24) // max(1, mean_gap))
    return chosen[chosen >= WIDTH - 1] + 1
