"""Where segment state is kept: the interface of all tiers, and the tier in memory."""

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal, Protocol

from redknot.segments.state import SegmentState


class SegmentStore(Protocol):
    """A tier. State becomes findable when `put` returns, whole or not at all; `get` never raises
    for damaged state but answers None."""

    def get(self, key: bytes) -> SegmentState | None:
        """State under ``key`` if it is there and undamaged. Counts as a use."""

    def has(self, key: bytes) -> bool:
        """Whether something is kept under ``key``; neither looks at it nor counts as a use."""

    def put(self, key: bytes, state: SegmentState) -> bool:
        """Keep ``state``; False if it cannot fit. The first state under a key stays."""

    def delete(self, key: bytes) -> bool:
        """Forget ``key``; whether it was there."""

    def keys(self) -> list[bytes]:
        """Keys of all findable state, the least recently used first."""

    def usage(self) -> "StoreUsage":
        """Counters since the store was made."""


@dataclass(frozen=True, slots=True)
class StoreUsage:
    """Counters of a store."""

    num_entries: int
    num_bytes: int
    capacity_bytes: int
    hits: int
    misses: int
    evictions: int
    damaged: int


class MemoryStore:
    """State in this process, bounded in bytes, least recently used out first."""

    def __init__(
        self,
        capacity_bytes: int = 4 << 30,
        *,
        verify: bool = True,
        place: Literal["as built", "host"] = "as built",
    ) -> None:
        """``verify`` compares a checksum at each hit, at the speed of the memory it is in.

        ``place`` says where: on the device of the model that built it, or in host memory.
        """
        if capacity_bytes < 0:
            raise ValueError(f"capacity of {capacity_bytes} bytes")
        self._capacity, self._verify, self._place = capacity_bytes, verify, place
        self._entries: OrderedDict[bytes, tuple[SegmentState, int]] = OrderedDict()
        self._bytes = self._hits = self._misses = self._evictions = self._damaged = 0
        self._lock = threading.Lock()

    def get(self, key: bytes) -> SegmentState | None:
        """State under ``key``; damaged state is dropped and is a miss."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None and self._verify and entry[0].checksum() != entry[1]:
                self._damaged += 1
                self._remove(key)
                entry = None
            if entry is None:
                self._misses += 1
                return None
            self._hits += 1
            self._entries.move_to_end(key)
            return entry[0]

    def has(self, key: bytes) -> bool:
        """Whether there is an entry under ``key``."""
        with self._lock:
            return key in self._entries

    def put(self, key: bytes, state: SegmentState) -> bool:
        """Keep ``state`` and make room for it."""
        size = state.num_bytes
        checksum = state.checksum() if self._verify else 0
        if self._place == "host" and size <= self._capacity:
            state = state.in_host_memory()
        with self._lock:
            if size > self._capacity:
                return False
            if key in self._entries:
                return True
            while self._bytes + size > self._capacity:
                self._remove(next(iter(self._entries)))
                self._evictions += 1
            self._entries[key] = (state, checksum)
            self._bytes += size
            return True

    def delete(self, key: bytes) -> bool:
        """Forget ``key``."""
        with self._lock:
            found = key in self._entries
            if found:
                self._remove(key)
            return found

    def keys(self) -> list[bytes]:
        """All keys, the least recently used first."""
        with self._lock:
            return list(self._entries)

    def usage(self) -> StoreUsage:
        """Counters since the store was made."""
        with self._lock:
            return StoreUsage(
                len(self._entries),
                self._bytes,
                self._capacity,
                self._hits,
                self._misses,
                self._evictions,
                self._damaged,
            )

    def check(self) -> None:
        """RuntimeError unless the counted bytes are those of the entries and within capacity."""
        with self._lock:
            counted = sum(state.num_bytes for state, _ in self._entries.values())
            if counted != self._bytes or counted > self._capacity:
                raise RuntimeError(f"store holds {counted} bytes, counted {self._bytes}")

    def _remove(self, key: bytes) -> None:
        state, _ = self._entries.pop(key)
        self._bytes -= state.num_bytes
