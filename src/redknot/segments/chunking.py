"""Content-defined chunking of token ids: spans for prompts that come without hints.

Borders depend on the tokens beside them alone, so a text keeps its borders wherever it stands
(Muthitacharoen et al. 2001, LBFS; gear hash of Xia et al. 2016, FastCDC).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

WIDTH = 16  # tokens that a border depends on


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSizes:
    """Lengths of chunks, in tokens."""

    smallest: int = 32
    average: int = 256
    "Where no break cuts."
    largest: int = 1024

    def __post_init__(self) -> None:
        if not WIDTH <= self.smallest <= self.average <= self.largest:
            raise ValueError(f"chunk sizes must grow from {WIDTH}: {self}")


def chunk(
    token_ids: Int[Tensor, "token"],
    sizes: ChunkSizes = ChunkSizes(),
    breaks: Sequence[int] = (),
) -> list[tuple[int, int]]:
    """Cut ``token_ids`` into chunks.

    ``breaks`` are places where one text ends and another may begin: first tokens behind blank
    lines, and the length of ``token_ids`` if nothing can be appended to them. A paragraph of at
    least the smallest size is cut off on both sides; shorter ones in a row stay together, and are
    left out if all of them together are too short. So the chunks of a text between two breaks
    never depend on what stands around it. What follows the last border is no chunk, unless it is
    closed by a break: it would change with whatever is appended.
    """
    candidates = _border_candidates(token_ids, sizes.average - sizes.smallest)
    chunks = []
    for start, stop, closed in _runs(len(token_ids), breaks, sizes.smallest):
        if closed and sizes.smallest <= stop - start <= sizes.largest:
            chunks.append((start, stop))
        else:
            chunks += _cut(start, stop, closed, candidates, sizes)
    return chunks


def _runs(length: int, breaks: Sequence[int], smallest: int) -> Iterator[tuple[int, int, bool]]:
    """What lies between the breaks that cut, and whether a break closes it."""
    edges = [0, *sorted({b for b in breaks if 0 < b < length}), length]
    start = 0
    for before, edge, after in zip(edges, edges[1:], edges[2:], strict=False):
        if edge - before >= smallest or after - edge >= smallest:
            yield start, edge, True
            start = edge
    yield start, length, length in breaks


def _cut(
    start: int, stop: int, closed: bool, candidates: np.ndarray, sizes: ChunkSizes
) -> Iterator[tuple[int, int]]:
    """Cut where the tokens themselves say so."""
    while stop - start >= sizes.smallest:
        later = candidates[np.searchsorted(candidates, start + sizes.smallest) :]
        end = min(int(later[0]) if len(later) else stop + 1, start + sizes.largest)
        if end > stop and not closed:
            return
        if closed and stop - end < sizes.smallest and stop - start <= sizes.largest:
            end = stop  # no rest too short to be a chunk
        yield start, end
        start = end


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
