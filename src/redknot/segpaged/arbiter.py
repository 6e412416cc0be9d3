"""Who gets the next page? Own quota, loans, call-backs and eviction over one pool."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int, Int32

from redknot.segpaged.eviction import Eviction, NoEviction
from redknot.segpaged.partitions import TAGS, Counters, PartitionsConfig, Tag
from redknot.segpaged.pool import OutOfPages, PagePool, Provenance
from redknot.segpaged.table import RowAllocator


@dataclass(slots=True)
class _Ledger:
    """Pages that are free, used and evictable, while an allocation is planned."""

    free: int
    used: dict[Tag, int]
    evictable: dict[Tag, int]

    def give_up(self, tag: Tag, count: int) -> None:
        self.free += count
        self.used[tag] -= count
        self.evictable[tag] -= count

    def take(self, tag: Tag, count: int) -> None:
        self.free -= count
        self.used[tag] += count


class Arbiter:
    """Allocates from ``pool`` for partitions; pages are freed and shared at the pool itself.

    A partition takes free pages within its quota and beyond it. If there are none, those beyond
    their quota evict for one that is within its own, then it evicts for itself.
    """

    def __init__(
        self,
        pool: PagePool,
        policies: Mapping[Tag, Eviction] | None = None,
        config: PartitionsConfig = PartitionsConfig(),
    ) -> None:
        self.pool = pool
        self._config = config
        self._policies = {tag: (policies or {}).get(tag, NoEviction()) for tag in TAGS}
        self._counters = {tag: Counters() for tag in TAGS}

    def quota(self, tag: Tag) -> int:
        """Pages that ``tag`` may claim; follows the size of the pool."""
        return int(self.pool.num_pages * self._config.of(tag).share)

    def used(self, tag: Tag) -> int:
        """Pages of ``tag`` that are held."""
        return self.pool.used_by(tag.number)

    def counters(self, tag: Tag) -> Counters:
        """What happened to the pages of ``tag`` so far."""
        counters = self._counters[tag]
        counters.freed = self.pool.freed_by(tag.number)
        return counters

    def allocate(
        self, tag: Tag, count: int, provenance: Provenance = Provenance.DERIVED
    ) -> Int32[np.ndarray, "page"]:
        """Take ``count`` pages for ``tag``."""
        return self.allocate_all({tag: count}, provenance)[tag]

    def allocate_all(
        self, counts: Mapping[Tag, int], provenance: Provenance = Provenance.DERIVED
    ) -> dict[Tag, Int32[np.ndarray, "page"]]:
        """Take pages for several tags, or raise `OutOfPages` and change nothing."""
        ledger = _Ledger(self.pool.num_free, {tag: self.used(tag) for tag in TAGS}, {})
        evictions: dict[tuple[Tag, Tag], int] = {}
        for tag, count in counts.items():
            try:
                self._plan(ledger, evictions, tag, count)
            except OutOfPages:
                self._counters[tag].refused += count
                raise
        for (tag, lender), count in evictions.items():
            freed = self._policies[tag].evict(count)
            self._counters[tag].evicted += freed
            if lender is not tag:
                self._counters[lender].called_back += min(freed, count)
        return {tag: self._hand_out(tag, count, provenance) for tag, count in counts.items()}

    def by_row(self, tags: Sequence[Tag]) -> RowAllocator:
        """An allocator for a page table whose row i belongs to ``tags[i]``."""
        numbers = np.array([tag.number for tag in tags])
        present = [tag for tag in TAGS if tag in tags]

        def allocate(counts: Int[np.ndarray, "row"]) -> Int32[np.ndarray, "page"]:
            total = np.bincount(numbers, weights=counts, minlength=len(TAGS))
            pages = self.allocate_all({tag: int(total[tag.number]) for tag in present})
            owner = np.repeat(numbers, counts)
            out = np.empty(len(owner), np.int32)
            for tag, part in pages.items():
                out[owner == tag.number] = part
            return out

        return allocate

    def _plan(
        self, ledger: _Ledger, evictions: dict[tuple[Tag, Tag], int], tag: Tag, count: int
    ) -> None:
        """Settle in ``ledger`` how ``count`` pages come about, and who must evict how many."""
        quota, settings = self.quota(tag), self._config.of(tag)
        available = max(0, ledger.free - self._kept_back(ledger, tag))
        missing = count - available
        if missing > 0:
            if not ledger.evictable:
                ledger.evictable |= {other: self._policies[other].evictable() for other in TAGS}
            due = max(0, min(count, quota - ledger.used[tag]) - available)
            for other in sorted(TAGS, key=lambda other: -self._over(ledger, other)):
                called = min(due, self._over(ledger, other), ledger.evictable[other])
                if other is not tag and called > 0:
                    evictions[other, tag] = evictions.get((other, tag), 0) + called
                    ledger.give_up(other, called)
                    due -= called
                    missing -= called
            if missing > ledger.evictable[tag]:
                raise OutOfPages(count, count - missing + ledger.evictable[tag])
            if missing > 0:
                if ledger.used[tag] > settings.high * quota:
                    size = max(quota, ledger.used[tag])  # what was borrowed is not lost at once
                    missing = max(missing, ledger.used[tag] + count - int(settings.low * size))
                own = min(missing, ledger.evictable[tag])
                evictions[tag, tag] = evictions.get((tag, tag), 0) + own
                ledger.give_up(tag, own)
        ledger.take(tag, count)

    def _hand_out(self, tag: Tag, count: int, provenance: Provenance) -> Int32[np.ndarray, "page"]:
        """Allocate, and charge what exceeds the quota to those with most unused pages."""
        beyond = min(count, max(0, self.used(tag) + count - self.quota(tag)))
        unused = {other: self.quota(other) - self.used(other) for other in TAGS if other is not tag}
        pages = self.pool.allocate(count, provenance, tag.number)
        counters = self._counters[tag]
        counters.allocated += count
        counters.borrowed += beyond
        for other in sorted(unused, key=lambda other: -unused[other]):
            lent = max(0, min(beyond, unused[other])) if self._config.of(other).lends else 0
            self._counters[other].lent += lent
            beyond -= lent
        return pages

    def _over(self, ledger: _Ledger, tag: Tag) -> int:
        """Pages of ``tag`` beyond its quota."""
        return max(0, ledger.used[tag] - self.quota(tag))

    def _kept_back(self, ledger: _Ledger, tag: Tag) -> int:
        """Unused pages of other partitions that do not lend."""
        others = [other for other in TAGS if other is not tag and not self._config.of(other).lends]
        return sum(max(0, self.quota(other) - ledger.used[other]) for other in others)
