"""The page table of one request: which page holds a position, for every (layer, group)."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from jaxtyping import Bool, Int, Int32

from redknot.segpaged.pool import CorruptPool, PagePool, Provenance
from redknot.segpaged.retention import Retention

ABSENT = -1

RowAllocator = Callable[[Int[np.ndarray, "row"]], Int32[np.ndarray, "page"]]


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Pages that follow each other in position, for one row or for all rows of a table."""

    first_position: int
    num_tokens: int
    pages: Int32[np.ndarray, "*row page"]  # -1: absent
    provenance: Provenance

    @property
    def held(self) -> Int32[np.ndarray, "page"]:
        """Pages that are present; a run itself holds no reference to them."""
        return self.pages[self.pages >= 0]


@dataclass(frozen=True, slots=True, eq=False)
class Appended:
    """What an append changed: ``logical()[:, first_page : first_page + page] = pages``.

    Contents of ``sources`` go to ``targets`` before the pool is used again: the table has already
    given back its reference to the sources.
    """

    first_page: int
    pages: Int32[np.ndarray, "row page"]
    sources: Int32[np.ndarray, "copy"]
    targets: Int32[np.ndarray, "copy"]


class PageTable:
    """Pages of one request. A row is a (layer, group); all rows have the same length in tokens.

    The table holds one reference to every page that it names. ``allocate`` gets the number of
    pages that each row needs and returns them in row order; without it the pool is asked.
    """

    def __init__(
        self,
        pool: PagePool,
        num_rows: int,
        *,
        page_size: int = 16,
        allocate: RowAllocator | None = None,
    ) -> None:
        if num_rows < 1 or page_size < 1:
            raise ValueError(f"{num_rows} rows of pages with {page_size} tokens")
        self.pool = pool
        self.page_size = page_size
        self._allocate = allocate or (lambda counts: pool.allocate(int(counts.sum())))
        self._length = 0
        self._pages = np.full((num_rows, 0), ABSENT, np.int32)  # with spare room at the end
        self._empty = np.zeros((2, num_rows), np.int64)  # a range without pages, for each row

    @property
    def length(self) -> int:
        """Positions in use, the absent ones included."""
        return self._length

    @property
    def num_rows(self) -> int:
        """Number of (layer, group) pairs."""
        return len(self._pages)

    @property
    def num_pages(self) -> int:
        """Pages held, over all rows."""
        return int(np.count_nonzero(self.logical() >= 0))

    @property
    def held(self) -> Int32[np.ndarray, "page"]:
        """All pages that the table has a reference to."""
        pages = self.logical()
        return pages[pages >= 0]

    def logical(self) -> Int32[np.ndarray, "row page"]:
        """Page of position // page_size, -1 if absent. A view, valid until the next change."""
        view = self._pages[:, : -(-self._length // self.page_size)]
        view.flags.writeable = False
        return view

    def append(
        self, tokens: int, retention: Retention | None = None, next_position: int | None = None
    ) -> Appended:
        """Make room for ``tokens`` more positions in all rows.

        With ``retention``, pages that no row from ``next_position`` (default: the old length) on
        sees stay absent. A last page that may not be written is replaced by a private one.
        """
        if tokens < 0:
            raise ValueError(f"cannot append {tokens} tokens")
        first = self._length // self.page_size
        stop = -(-(self._length + tokens) // self.page_size) if tokens else first
        self._reserve(stop)
        block = self._pages[:, first:stop]
        new = block == ABSENT
        if retention is not None:
            start = self._length if next_position is None else next_position
            for rows, begin, end in retention.gaps(start, self.page_size, stop):
                new[rows, max(begin - first, 0) : max(end - first, 0)] = False
        fixed = self._not_writable(block) if tokens else np.zeros(0, np.int64)
        new[fixed, :1] = True
        pages = self._allocate(np.count_nonzero(new, axis=1))
        sources = block[fixed, :1].reshape(-1)
        if len(pages) == block.size:
            block[...] = pages.reshape(block.shape)
        else:
            block[new] = pages
        self._length += tokens
        self.pool.free(sources)
        return Appended(first, block.copy(), sources, block[fixed, :1].reshape(-1))

    def keep(self, retention: Retention, next_position: int) -> int:
        """Evict every page that no row from ``next_position`` on may see; returns how many.

        The page that is being filled stays.
        """
        full = self._length // self.page_size
        gaps = retention.gaps(next_position, self.page_size, full)
        return sum(self._drop(rows, first, stop) for rows, first, stop in gaps)

    def evictable(self, retention: Retention, next_position: int) -> int:
        """How many pages `keep` would return to the pool, shared ones left out."""
        full = self._length // self.page_size
        free = 0
        for rows, first, stop in retention.gaps(next_position, self.page_size, full):
            block = self._pages[rows, self._scan_from(rows, first, stop) : stop]
            free += int(np.count_nonzero(self.pool.references(block[block >= 0]) == 1))
        return free

    def release(self, rows: Int[np.ndarray, "row"] | None, first: int, last: int) -> int:
        """Drop pages of ``rows`` (None: all) whose tokens all lie in [first, last)."""
        begin = -(-first // self.page_size)
        end = (last if last < self._length else self._length + self.page_size - 1) // self.page_size
        index = np.arange(self.num_rows) if rows is None else rows
        block = self._pages[index, begin:end]
        pages = block[block >= 0]
        self._pages[index, begin:end] = ABSENT
        self.pool.free(pages)
        return len(pages)

    def truncate(self, tokens: int) -> None:
        """Forget all positions from ``tokens`` on."""
        if not 0 <= tokens <= self._length:
            raise ValueError(f"{tokens} of {self._length} tokens")
        first = -(-tokens // self.page_size)
        pages = self.logical()[:, first:]
        gone = pages[pages >= 0]
        self._pages[:, first:] = ABSENT
        self._empty[:, self._empty[1] > first] = 0
        self._length = tokens
        self.pool.free(gone)

    def fork(self) -> "PageTable":
        """A table of the same pages, shared until one of the two writes."""
        other = PageTable(
            self.pool, self.num_rows, page_size=self.page_size, allocate=self._allocate
        )
        self.pool.share(self.held)
        other._length = self._length
        other._pages = self._pages.copy()
        other._empty = self._empty.copy()
        return other

    def free(self) -> None:
        """Give back all pages; the table is empty again."""
        pages = self.held
        self._length = 0
        self._pages = np.full((self.num_rows, 0), ABSENT, np.int32)
        self._empty[...] = 0
        self.pool.free(pages)

    def seal(self, provenance: Provenance, tokens: int) -> None:
        """Make the full pages of the first ``tokens`` immutable."""
        if not 0 <= tokens <= self._length:
            raise ValueError(f"{tokens} of {self._length} tokens")
        pages = self._pages[:, : tokens // self.page_size]
        self.pool.seal(pages[pages >= 0], provenance)

    def adopt(self, run: Run) -> None:
        """Continue with the shared pages of ``run``, which holds all rows and starts at length."""
        tokens, columns = run.num_tokens, -(-run.num_tokens // self.page_size)
        if run.first_position != self._length or self._length % self.page_size:
            raise ValueError(f"a run from {run.first_position} on after {self._length} tokens")
        if run.pages.shape != (self.num_rows, columns):
            raise ValueError(f"{tokens} tokens in {run.pages.shape} pages")
        self.pool.share(run.held)
        first = self._length // self.page_size
        self._reserve(first + columns)
        self._pages[:, first : first + columns] = run.pages
        self._length += tokens

    def span(self, first: int, last: int, provenance: Provenance) -> Run:
        """Positions [first, last) of all rows as a run; ``first`` begins a page."""
        if first % self.page_size or not first <= last <= self._length:
            raise ValueError(f"no run from {first} to {last} in {self._length} tokens")
        pages = self._pages[:, first // self.page_size : -(-last // self.page_size)].copy()
        return Run(first, last - first, pages, provenance)

    def runs(self, row: int) -> list[Run]:
        """Stretches of present pages of equal provenance of one row, by position."""
        pages = self.logical()[row]
        kind = np.where(pages >= 0, self.pool.provenance(np.maximum(pages, 0)), ABSENT)
        edges = [0, *(np.flatnonzero(np.diff(kind)) + 1).tolist(), len(pages)]
        size, found = self.page_size, []
        for first, stop in pairwise(edges):
            if first < stop and pages[first] >= 0:
                tokens = min(stop * size, self._length) - first * size
                part = pages[first:stop].copy()
                found.append(Run(first * size, tokens, part, Provenance(int(kind[first]))))
        return found

    def check(self) -> None:
        """Raise `CorruptPool` unless every page is held, and written in one place at most."""
        spare = self._pages[:, self.logical().shape[1] :]
        held = self.held
        if (spare != ABSENT).any() or (self.logical() < ABSENT).any():
            raise CorruptPool("entries outside the table")
        if held.size and (held.max() >= self.pool.num_pages or not self._all_held(held)):
            raise CorruptPool("the table names pages that are not held")
        own = np.sort(held[self.pool.provenance(held) == Provenance.DERIVED])
        if (own[1:] == own[:-1]).any():
            raise CorruptPool("a page that can be written stands in two places")

    def _all_held(self, pages: Int32[np.ndarray, "page"]) -> bool:
        return bool(self.pool.references(pages).all())

    def _not_writable(self, block: Int32[np.ndarray, "row page"]) -> Int[np.ndarray, "row"]:
        """Rows whose last, partly filled page is shared or sealed."""
        if self._length % self.page_size == 0:
            return np.zeros(0, np.int64)
        last = block[:, 0]
        rows = np.flatnonzero(last >= 0)
        return rows[~self.pool.writable(last[rows])]

    def _drop(self, rows: Int[np.ndarray, "row"], first: int, stop: int) -> int:
        """Drop pages ``first`` to ``stop``, of which no row will be used again."""
        begin = self._scan_from(rows, first, stop)
        block = self._pages[rows, begin:stop]
        present: Bool[np.ndarray, "row page"] = block >= 0
        pages = block[present]
        if pages.size:
            self._pages[rows, begin:stop] = ABSENT
            self.pool.free(pages)
        self._empty[:, rows] = np.array([[first], [stop]])
        return len(pages)

    def _scan_from(self, rows: Int[np.ndarray, "row"], first: int, stop: int) -> int:
        """Where pages of ``rows`` may begin after ``first``: a window only leaves its old end."""
        since, until = self._empty[:, rows]
        if (since <= first).all():
            return min(max(first, int(until.min())), stop)
        return first

    def _reserve(self, num_pages: int) -> None:
        spare = num_pages - self._pages.shape[1]
        if spare > 0:
            room = max(spare, self._pages.shape[1] // 2)
            empty = np.full((self.num_rows, room), ABSENT, np.int32)
            self._pages = np.concatenate([self._pages, empty], axis=1)
