"""K/V of one layer behind page tables: what every kernel reads and writes."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
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
    copied: bool = False
    "Always copy to read, in one piece: then no bit of a result depends on where pages stand."
    _stretches: dict[tuple[int, ...], list["_Stretch"]] = field(default_factory=dict)

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
        found = []
        for stretch in self._stretches_of(tuple(streams)):
            first = stretch.first * size
            low, high = max(start, first), min(stop, first + stretch.pages.shape[1] * size)
            if low >= high or (gaps and stretch.held is False):
                continue
            if not stretch.held:
                raise ValueError(f"positions {start} to {stop} are not all held")
            begin, end = (low - first) // size, -(-(high - first) // size)
            cut = slice(low - first - begin * size, high - first - begin * size)
            key, value = (
                _join(plane, stretch.pages[:, begin:end], stretch.stride)
                for plane in (self.key, self.value)
            )
            found.append(Piece(low, key[:, cut], value[:, cut]))
        return found

    def _stretches_of(self, streams: tuple[int, ...]) -> list["_Stretch"]:
        """The pages of ``streams``, looked at once: the table does not change under a view."""
        if streams not in self._stretches:
            table = self.table.cpu() if self.host is None else self.host
            self._stretches[streams] = _stretches(table[list(streams)], self.copied)
        return self._stretches[streams]


class Piece(NamedTuple):
    """Consecutive positions of some streams."""

    start: int
    key: Float[Tensor, "stream token dim"]
    value: Float[Tensor, "stream token dim"]

    @property
    def stop(self) -> int:
        """The position after the last."""
        return self.start + self.key.shape[1]


class _Stretch(NamedTuple):
    """Columns of a page table that are read alike."""

    first: int
    pages: Int[Tensor, "stream page"]
    held: bool | None
    "Whether all are held, none, or (None) only some streams hold them."
    stride: int | None
    "Pages from one stream to the next where each holds consecutive ones; None: copy."


def _stretches(pages: Int[Tensor, "stream page"], copied: bool) -> list[_Stretch]:
    """Runs of `VIEW_PAGES` or more in even strides, absent pages, and what lies between them."""
    steps = (pages[:, 1:] - pages[:, :-1]) == 1
    holders = (pages >= 0).sum(0)
    alike = holders[1:] == holders[:-1]
    joined = alike & (steps.all(0) | (holders[1:] == 0))
    borders = [0, *((~joined).nonzero()[:, 0] + 1).tolist(), pages.shape[1]]
    found: list[_Stretch] = []
    for begin, end in itertools.pairwise(borders):
        columns, count = pages[:, begin:end], int(holders[begin]) if begin < end else 0
        held = True if count == len(pages) else (None if count else False)
        viewed = held and end - begin >= VIEW_PAGES and not copied
        stride = _stride(columns) if viewed else None
        last = found[-1] if found else None
        if held and stride is None and last is not None and last.held and last.stride is None:
            found[-1] = _Stretch(last.first, pages[:, last.first : end], True, None)
        else:
            found.append(_Stretch(begin, columns, held, stride))
    if copied:
        return found
    return [
        one if one.stride is not None or not one.held else one._replace(stride=_stride(one.pages))
        for one in found
    ]


def _stride(pages: Int[Tensor, "stream page"]) -> int | None:
    """Pages from one stream to the next, if they are as many everywhere and pages are in order."""
    first = pages[:, 0]
    steps = first[1:] - first[:-1]
    stride = int(steps[0]) if len(steps) else 0
    even = bool((steps == stride).all()) and stride >= 0
    ordered = bool(((pages - first[:, None]) == torch.arange(pages.shape[1])).all())
    return stride if even and ordered else None


def _join(plane: Tensor, pages: Int[Tensor, "stream page"], stride: int | None) -> Tensor:
    """Pages side by side as [stream, token, dim]: a view where the stride is known."""
    num_streams, size, dim = len(pages), plane.shape[1], plane.shape[2]
    if stride is None:
        return plane[pages.flatten().to(plane.device)].view(num_streams, -1, dim)
    return plane.as_strided(
        (num_streams, pages.shape[1] * size, dim),
        (stride * plane.stride(0), plane.stride(1), plane.stride(2)),
        plane.storage_offset() + int(pages[0, 0]) * plane.stride(0),
    )
