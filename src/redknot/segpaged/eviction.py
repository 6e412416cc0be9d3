"""What may a partition give up? One small policy each."""

import math
from collections.abc import Callable, Hashable
from typing import Protocol

import numpy as np
from jaxtyping import Int

from redknot.segpaged.pool import PagePool
from redknot.segpaged.retention import Retention
from redknot.segpaged.table import PageTable


class Eviction(Protocol):
    """Gives pages of one partition back to the pool; no two partitions have the same one."""

    def evictable(self) -> int:
        """Pages that `evict` can surely return to the pool."""
        ...

    def evict(self, count: int) -> int:
        """Return at least ``count`` evictable pages; the number that became free."""
        ...


class NoEviction:
    """For pages that are needed until their request ends."""

    def evictable(self) -> int:
        """None."""
        return 0

    def evict(self, count: int) -> int:
        """Nothing."""
        return 0


class WindowEviction:
    """Pages of registered tables that no future row sees; costs nothing that is still needed."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._tables: dict[PageTable, tuple[Retention, int]] = {}

    def register(self, table: PageTable, retention: Retention, next_position: int = 0) -> None:
        """Watch the rows of ``retention``; call again whenever ``next_position`` has moved."""
        self._tables[table] = (retention, next_position)

    def remove(self, table: PageTable) -> None:
        """Stop watching, before the table is freed."""
        del self._tables[table]

    def evictable(self) -> int:
        """Unseen pages that only their table holds."""
        return sum(table.evictable(*seen) for table, seen in self._tables.items())

    def evict(self, count: int) -> int:
        """Drop unseen pages table by table until ``count`` are free."""
        before = self._pool.num_free
        for table, seen in self._tables.items():
            if self._pool.num_free - before >= count:
                break
            table.keep(*seen)
        return self._pool.num_free - before


class ScoredEviction:
    """Entries by recency and frequency: every use counts 1 and halves after ``half_life`` uses.

    A half-life of one use is close to least recently used, an infinite one is least frequently
    used. The policy holds the reference that was handed to `register`; entries of which a page has
    another reference are in use and stay, so entries must not overlap. ``on_evict`` learns the key
    of an entry that has gone.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        half_life: float = 1024.0,
        on_evict: Callable[[Hashable], None] | None = None,
    ) -> None:
        if not half_life > 0:
            raise ValueError(f"a half-life of {half_life} uses")
        self._pool = pool
        self._half_life = half_life
        self._on_evict = on_evict
        self._uses = 0
        self._pages: dict[Hashable, Int[np.ndarray, "page"]] = {}
        self._ranks: dict[Hashable, tuple[float, int]] = {}

    def register(self, key: Hashable, pages: Int[np.ndarray, "page"]) -> None:
        """Take over one reference to each of ``pages``; counts as a first use."""
        if key in self._pages:
            raise ValueError(f"an entry {key!r} exists")
        self._pages[key] = pages
        self._ranks[key] = (-math.inf, self._uses)
        self.touch(key)

    def touch(self, key: Hashable) -> None:
        """Count a use."""
        self._uses += 1
        # log2 of the decayed count, as if all entries had decayed since the first use: comparable
        # between entries without ageing any
        rank, now = self._ranks[key][0], self._uses / self._half_life
        self._ranks[key] = (now + math.log2(1 + 2.0 ** (rank - now)), self._uses)

    def remove(self, key: Hashable) -> Int[np.ndarray, "page"]:
        """Forget an entry and hand its reference back."""
        del self._ranks[key]
        return self._pages.pop(key)

    def evictable(self) -> int:
        """Pages of all entries that nobody uses."""
        return sum(len(pages) for pages in self._pages.values() if self._idle(pages))

    def evict(self, count: int) -> int:
        """Free whole entries, lowest score and then longest unused first."""
        freed = 0
        for key in sorted(self._ranks, key=self._ranks.__getitem__):
            if freed >= count:
                break
            if self._idle(self._pages[key]):
                pages = self.remove(key)
                self._pool.free(pages)
                freed += len(pages)
                if self._on_evict is not None:
                    self._on_evict(key)
        return freed

    def _idle(self, pages: Int[np.ndarray, "page"]) -> bool:
        return bool((self._pool.references(pages) == 1).all())
