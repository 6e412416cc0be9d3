"""The pool counts pages: ids, references and provenance, without tensors, heads or page size."""

from collections.abc import Iterable
from enum import IntEnum

import numpy as np
from jaxtyping import Bool, Int, Int8, Int32


class OutOfPages(RuntimeError):
    """Fewer pages can be had than were asked for; nothing has changed."""

    def __init__(self, asked: int, free: int) -> None:
        super().__init__(f"{asked} pages asked for, {free} can be had")
        self.asked = asked
        self.free = free


class CorruptPool(RuntimeError):
    """Counts and owners of pages disagree."""


class Provenance(IntEnum):
    """How the contents of a page came about; only derived pages may be written."""

    DERIVED = 0  # made by a plan
    CANONICAL = 1  # segment state
    EXACT = 2  # dense, from the start of the prompt


class PagePool:
    """Pages 0 to ``num_pages``, each free or held by one or more references.

    Every page carries the number of the partition that it was allocated for, so that shares of
    the pool can be counted; the pool itself treats all partitions alike.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 0:
            raise ValueError(f"a pool cannot have {num_pages} pages")
        self._references = np.zeros(num_pages, np.int32)
        self._provenance = np.zeros(num_pages, np.int8)
        self._partition = np.zeros(num_pages, np.int8)
        self._free = _descending(0, num_pages)  # a stack, lowest id on top
        self._num_free = num_pages
        self._used, self._freed = np.zeros((2, 128), np.int64)

    @property
    def num_pages(self) -> int:
        """All pages, free or held."""
        return len(self._references)

    @property
    def num_free(self) -> int:
        """Pages without a reference."""
        return self._num_free

    @property
    def num_used(self) -> int:
        """Pages with a reference."""
        return self.num_pages - self._num_free

    def used_by(self, partition: int) -> int:
        """Held pages of one partition."""
        return int(self._used[partition])

    def freed_by(self, partition: int) -> int:
        """Pages of one partition that have become free since the start."""
        return int(self._freed[partition])

    def grow(self, num_pages: int) -> None:
        """Add ``num_pages``; they are allocated after those that are free now."""
        if num_pages < 0:
            raise ValueError(f"a pool cannot grow by {num_pages} pages")
        old = self.num_pages
        fresh = _descending(old, old + num_pages)
        empty = np.zeros(num_pages, np.int32)
        held = np.zeros(self.num_used, np.int32)  # room for what comes back
        self._free = np.concatenate([fresh, self._free[: self._num_free], held])
        self._references = np.concatenate([self._references, empty])
        self._provenance = np.concatenate([self._provenance, empty.astype(np.int8)])
        self._partition = np.concatenate([self._partition, empty.astype(np.int8)])
        self._num_free += num_pages

    def allocate(
        self, count: int, provenance: Provenance = Provenance.DERIVED, partition: int = 0
    ) -> Int32[np.ndarray, "page"]:
        """Take ``count`` free pages, one reference each.

        Ids are consecutive and ascending while nothing has been freed out of order.
        """
        if count < 0:
            raise ValueError(f"cannot allocate {count} pages")
        if count > self._num_free:
            raise OutOfPages(count, self._num_free)
        left = self._num_free - count
        pages = self._free[left : self._num_free][::-1].copy()
        self._num_free = left
        self._references[pages] = 1
        self._provenance[pages] = provenance
        self._partition[pages] = partition
        self._used[partition] += count
        return pages

    def share(self, pages: Int[np.ndarray, "page"]) -> None:
        """Add one reference for each mention of a held page."""
        self._require_held(pages)
        self._count(pages, 1)

    def free(self, pages: Int[np.ndarray, "page"]) -> None:
        """Give back one reference for each mention; pages without any are free again."""
        self._require_held(pages)
        self._count(pages, -1)
        left = self._references[pages]
        if pages.size and left.min() < 0:
            self._count(pages, 1)
            raise ValueError("pages are freed more often than they are held")
        gone = _distinct(pages[left == 0])[::-1]
        by_partition = np.bincount(self._partition[gone], minlength=len(self._used))
        self._used -= by_partition
        self._freed += by_partition
        self._free[self._num_free : self._num_free + len(gone)] = gone
        self._num_free += len(gone)
        if self._num_free == self.num_pages:
            self._free = _descending(0, self.num_pages)  # an empty pool is as good as a new one

    def seal(self, pages: Int[np.ndarray, "page"], provenance: Provenance) -> None:
        """Make held pages immutable; a sealed page keeps its provenance."""
        self._require_held(pages)
        now = self._provenance[pages]
        if provenance is Provenance.DERIVED or bool(
            ((now != Provenance.DERIVED) & (now != provenance)).any()
        ):
            raise ValueError(f"only derived pages can be sealed, not as {provenance.name.lower()}")
        self._provenance[pages] = provenance

    def move(self, pages: Int[np.ndarray, "page"], partition: int) -> None:
        """Count held ``pages`` (each named once) under another partition from now on."""
        self._require_held(pages)
        self._used -= np.bincount(self._partition[pages], minlength=len(self._used))
        self._partition[pages] = partition
        self._used[partition] += len(pages)

    def writable(self, pages: Int[np.ndarray, "page"]) -> Bool[np.ndarray, "page"]:
        """Which pages have exactly one reference and are derived."""
        return (self._references[pages] == 1) & (self._provenance[pages] == Provenance.DERIVED)

    def references(self, pages: Int[np.ndarray, "page"]) -> Int32[np.ndarray, "page"]:
        """References of each page; 0 when free."""
        return self._references[pages]

    def provenance(self, pages: Int[np.ndarray, "page"]) -> Int8[np.ndarray, "page"]:
        """Values of `Provenance` of held pages."""
        return self._provenance[pages]

    def check(self, holders: Iterable[Int[np.ndarray, "page"]] | None = None) -> None:
        """Raise `CorruptPool` unless counts, free list and, if given, all holders agree."""
        free = self._free[: self._num_free]
        idle = np.flatnonzero(self._references == 0)
        if len(self._free) != self.num_pages or not np.array_equal(np.sort(free), idle):
            raise CorruptPool("the free list is not the pages without references")
        if (self._references < 0).any():
            raise CorruptPool("a page has fewer than no references")
        used = np.bincount(self._partition[self._references > 0], minlength=len(self._used))
        if not np.array_equal(used, self._used):
            raise CorruptPool("partitions do not add up to the held pages")
        if holders is None:
            return
        held = np.concatenate([np.zeros(0, np.int64), *(pages.reshape(-1) for pages in holders)])
        if held.size and (held.min() < 0 or held.max() >= self.num_pages):
            raise CorruptPool("a holder names a page that does not exist")
        wrong = np.flatnonzero(np.bincount(held, minlength=self.num_pages) - self._references)
        if wrong.size:
            raise CorruptPool(f"references and holders differ for pages {wrong[:8].tolist()}")

    def _count(self, pages: Int[np.ndarray, "page"], by: int) -> None:
        # the fast loop of ufunc.at needs this index type and equal types: 0.1 ms, not 10, per 10^5
        np.add.at(self._references, pages.astype(np.intp), np.int32(by))

    def _require_held(self, pages: Int[np.ndarray, "page"]) -> None:
        if not pages.size:
            return
        if pages.min() < 0 or pages.max() >= self.num_pages or not self._references[pages].all():
            raise ValueError("pages that are not held")


def _distinct(pages: Int[np.ndarray, "page"]) -> Int[np.ndarray, "page"]:
    """Each page once, ascending; many pages are marked in place of sorted."""
    if not pages.size:
        return pages
    first = int(pages.min())
    span = int(pages.max()) - first + 1
    if span > 32 * len(pages):
        return np.unique(pages)
    marks = np.zeros(span, np.bool_)
    marks[pages - first] = True
    return np.flatnonzero(marks) + first


def _descending(first: int, stop: int) -> Int32[np.ndarray, "page"]:
    return np.arange(stop - 1, first - 1, -1, dtype=np.int32)
