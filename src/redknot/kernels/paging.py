"""K/V of one layer behind page tables: what every kernel reads and writes."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

ABSENT = -1
"Entry of a page table where nothing is held."
VIEW_PAGES = 4
"Fewer consecutive pages are cheaper copied together with their neighbours than attended alone."


@dataclass(frozen=True, slots=True, eq=False)
class PagedKV:
    """Planes of a page pool, seen through the page tables of some streams.

    A stream is the K/V of one KV head of one request; request r has the streams
    ``r * num_kv_heads`` and following. Position j of a stream stands in page
    ``table[stream, j // page_size]`` at offset ``j % page_size``.
    """

    key: Float[Tensor, "page page_size dim"]
    value: Float[Tensor, "page page_size dim"]
    table: Int[Tensor, "stream logical_page"]
    "int32; `ABSENT` where nothing is held."
    num_kv_heads: int
    host: Int[Tensor, "stream logical_page"] | None = None
    "The same table on the host, where it is known there: nothing then waits for the device."

    def __post_init__(self) -> None:
        if self.key.shape != self.value.shape:
            raise ValueError(f"planes of pages and dim {self.key.shape} and {self.value.shape}")
        if not (self.key.is_contiguous() and self.value.is_contiguous()):
            raise ValueError("planes must be contiguous")
        if self.table.dtype != torch.int32 or self.table.shape[0] % self.num_kv_heads:
            raise ValueError(
                f"a table is int32 over whole requests, not {self.table.dtype} over"
                f" {self.table.shape[0]} streams of {self.num_kv_heads} KV heads"
            )

    @classmethod
    def dense(
        cls, key: Float[Tensor, "kv_head token dim"], value: Float[Tensor, "kv_head token dim"]
    ) -> "PagedKV":
        """Contiguous K/V of one request as one page for each KV head; nothing is copied."""
        table = torch.arange(len(key), dtype=torch.int32, device=key.device)[:, None]
        return cls(key, value, table, len(key))

    @property
    def page_size(self) -> int:
        """Tokens of one page."""
        return self.key.shape[1]

    @property
    def num_requests(self) -> int:
        """Requests whose streams the table lists."""
        return self.table.shape[0] // self.num_kv_heads

    @property
    def capacity(self) -> int:
        """Positions that the table can name."""
        return self.table.shape[1] * self.page_size

    def pieces(
        self, streams: Sequence[int], start: int, stop: int, *, gaps: bool = False
    ) -> list["Piece"]:
        """K and V of positions ``start`` to ``stop``, in order, copied only where they must be.

        Pages that stand in even strides are views; what lies between such runs is copied together.
        Without a table on the host this waits for the device. ValueError where a page is absent;
        with ``gaps`` pages that are absent in all streams are left out.
        """
        size = self.page_size
        first, last = start // size, -(-stop // size)
        if start >= stop:
            return []
        table = self.table.cpu() if self.host is None else self.host
        pages = table[list(streams), first:last]
        absent = pages < 0
        if bool((absent.any(0) if not gaps else absent.any(0) & ~absent.all(0)).any()):
            raise ValueError(f"positions {start} to {stop} are not all held")
        found = []
        for begin, end in _runs(pages):
            if absent[0, begin]:
                continue
            low, high = max(start, (first + begin) * size), min(stop, (first + end) * size)
            cut = slice(low - (first + begin) * size, high - (first + begin) * size)
            key, value = (self._gather(plane, pages[:, begin:end]) for plane in self._planes)
            found.append(Piece(low, key[:, cut], value[:, cut]))
        return found

    @property
    def _planes(self) -> tuple[Tensor, Tensor]:
        return self.key, self.value

    @staticmethod
    def _gather(plane: Tensor, pages: Int[Tensor, "stream page"]) -> Tensor:
        num_streams, size, dim = len(pages), plane.shape[1], plane.shape[2]
        if not _even(pages).all():
            return plane[pages.flatten().to(plane.device)].view(num_streams, -1, dim)
        stride = int(pages[-1, 0] - pages[0, 0]) // max(1, num_streams - 1)
        return plane.as_strided(
            (num_streams, pages.shape[1] * size, dim),
            (stride * plane.stride(0), plane.stride(1), plane.stride(2)),
            plane.storage_offset() + int(pages[0, 0]) * plane.stride(0),
        )


class Piece(NamedTuple):
    """Consecutive positions of some streams."""

    start: int
    key: Float[Tensor, "stream token dim"]
    value: Float[Tensor, "stream token dim"]

    @property
    def stop(self) -> int:
        """The position after the last."""
        return self.start + self.key.shape[1]


def _even(pages: Int[Tensor, "stream page"]) -> Bool[Tensor, "page"]:
    """Whether each column continues the first, by an equal step from stream to stream."""
    first = pages[:, 0]
    steps = first[1:] - first[:-1]
    level = not len(steps) or bool((steps == steps[0]).all() & (steps[0] >= 0))
    return ((pages - first[:, None]) == torch.arange(pages.shape[1])).all(0) & level


def _runs(pages: Int[Tensor, "stream page"]) -> list[tuple[int, int]]:
    """Column ranges: runs of `VIEW_PAGES` or more in even strides, and what lies between them."""
    count = pages.shape[1]
    joined = ((pages[:, 1:] - pages[:, :-1]) == 1).all(0)
    absent = pages[0] < 0
    joined = torch.where(absent[1:] | absent[:-1], absent[1:] & absent[:-1], joined)
    was_view = False
    borders = [0, *((~joined).nonzero()[:, 0] + 1).tolist(), count]
    ranges: list[tuple[int, int]] = []
    for begin, end in itertools.pairwise(borders):
        short = end - begin < VIEW_PAGES or not bool(_even(pages[:, begin:end]).all())
        gap = bool(absent[begin])
        if short and ranges and not was_view and not gap:
            ranges[-1] = (ranges[-1][0], end)
        else:
            ranges.append((begin, end))
        was_view = not short or gap
    return ranges
