"""Pages of earlier prompts, shared with prompts that begin alike."""

import weakref
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int
from torch import Tensor

from redknot.execution.cache import PromptCache
from redknot.segpaged import PageStorage

MOST = 1024
"Beginnings that are kept; each is compared with every new prompt."


@dataclass(frozen=True, slots=True)
class Scope:
    """Who may find a beginning."""

    salt: str = ""
    "Tenant."
    chain: str = ""
    "What made the state, where it is not dense's: only prompts that go on from the whole of it and"
    " run under the same find it. Empty: exactly what dense computes."


@dataclass(frozen=True, slots=True, eq=False)
class Beginning:
    """State of the first ``tokens`` of a prompt, in pages of its own counting."""

    cache: PromptCache
    tokens: int
    scope: Scope


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    scope: Scope
    token_ids: np.ndarray
    cache: PromptCache
    least: int
    "Tokens that a prompt must share."

    def shared(self, ids: np.ndarray) -> int:
        """First tokens that a prompt of ``ids`` may take over."""
        shared = _shared(self.token_ids, ids)
        whole = self.scope.chain == "" or len(ids) > shared
        return shared if shared >= self.least and whole else 0


class Beginnings:
    """Bounded in bytes; the least recently used goes first, also when others need its pages."""

    def __init__(self, storage: PageStorage, capacity_bytes: int = 1 << 30) -> None:
        self._capacity = capacity_bytes
        self._entries: OrderedDict[tuple[Scope, bytes], _Entry] = OrderedDict()
        self._times = np.zeros(0, dtype=np.int64)
        "How many entries hold each page."
        myself = weakref.ref(self)  # the storage must not keep what is in its own pages

        def reclaim(num_pages: int) -> int:
            beginnings = myself()
            return 0 if beginnings is None else beginnings.reclaim(num_pages)

        self._pool, self._page_bytes, storage.reclaim = storage.pool, storage.page_bytes, reclaim

    @property
    def num_bytes(self) -> int:
        """Bytes of the pages that entries hold."""
        return self._page_bytes * int(np.count_nonzero(self._times))

    def put(
        self, token_ids: Int[Tensor, "token"], cache: PromptCache, scope: Scope = Scope(),
        least: int = 1,
    ) -> None:  # fmt: skip
        """Keep ``cache``, which holds just ``token_ids`` and is the caller's no more.

        A beginning that an entry of its scope already covers is not kept; one that it covers goes.
        """
        ids = token_ids.cpu().numpy().astype(np.int64)
        if not len(ids) or cache.num_bytes > self._capacity:
            return
        for key, entry in list(self._entries.items()):
            if entry.scope != scope or least > 1:
                continue
            shared = _shared(entry.token_ids, ids)
            if shared == len(ids):
                self._entries.move_to_end(key)
                return
            if shared == len(entry.token_ids):
                self._drop(key)
        key = scope, ids.tobytes()
        if key in self._entries:
            self._drop(key)
        self._entries[key] = _Entry(scope, ids, cache, least)
        self._count(cache, 1)
        while self.num_bytes > self._capacity or len(self._entries) > MOST:
            self._drop(next(iter(self._entries)))

    def find(
        self, token_ids: Int[Tensor, "token"], scopes: Iterable[Scope] = (Scope(),)
    ) -> Beginning | None:
        """The entry of ``scopes`` that shares most first tokens; counts as a use."""
        ids, allowed = token_ids.cpu().numpy(), set(scopes)
        best: tuple[int, tuple[Scope, bytes]] | None = None
        for key, entry in self._entries.items():
            if entry.scope not in allowed:
                continue
            shared = entry.shared(ids)
            if shared and (best is None or shared > best[0]):
                best = shared, key
        if best is None:
            return None
        self._entries.move_to_end(best[1])
        return Beginning(self._entries[best[1]].cache, best[0], best[1][0])

    def reclaimable(self) -> int:
        """Pages that nobody but entries holds."""
        pages = self._times.nonzero()[0]
        return int((self._pool.references(pages) == self._times[pages]).sum())

    def reclaim(self, num_pages: int) -> int:
        """Let go of entries until so many more pages are free; of none where all are too few."""
        before = self._pool.num_free
        if self.reclaimable() < num_pages:
            return 0
        for key in list(self._entries):
            if self._pool.num_free - before >= num_pages:
                break
            self._drop(key)
        return self._pool.num_free - before

    def forget(self) -> None:
        """Let go of everything."""
        while self._entries:
            self._drop(next(iter(self._entries)))

    def _drop(self, key: tuple[Scope, bytes]) -> None:
        """A prompt that still reads these pages has references of its own."""
        entry = self._entries.pop(key)
        self._count(entry.cache, -1)
        entry.cache.release()

    def _count(self, cache: PromptCache, times: int) -> None:
        """One more entry holds the pages of ``cache``, or one less."""
        more = self._pool.num_pages - len(self._times)
        if more > 0:
            self._times = np.pad(self._times, (0, more))
        self._times[cache.held] += times


def _shared(known: np.ndarray, ids: np.ndarray) -> int:
    """How many first tokens are equal."""
    length = min(len(known), len(ids))
    differs = np.flatnonzero(known[:length] != ids[:length])
    return int(differs[0]) if len(differs) else length
