"""Texts that clients have registered, each seen by its own tenant alone."""

import hashlib
import time
from collections import OrderedDict
from dataclasses import dataclass, field

ENTRY_BYTES = 1024
"What an entry takes besides its text."


@dataclass(frozen=True, slots=True)
class Registered:
    """A text with an id, and the keys of its states in the engine."""

    id: str
    text: str
    title: str
    keys: tuple[str, ...]
    "One, unless the chat template writes documents in a way of its own."
    num_tokens: int
    created: int = field(default_factory=lambda: int(time.time()))


class Registry:
    """Bounded by the size of all entries; those that were used least recently give way."""

    def __init__(self, max_bytes: int) -> None:
        self._most, self._size = max_bytes, 0
        self._entries: OrderedDict[tuple[str, str], Registered] = OrderedDict()

    def add(self, salt: str, entry: Registered) -> None:
        """Keep ``entry``."""
        self.remove(salt, entry.id)
        self._entries[salt, entry.id] = entry
        self._size += _size(entry)
        while self._size > self._most and len(self._entries) > 1:
            _, oldest = self._entries.popitem(last=False)
            self._size -= _size(oldest)

    def get(self, salt: str, segment_id: str) -> Registered | None:
        """The entry, if it is this tenant's."""
        found = self._entries.get((salt, segment_id))
        if found is not None:
            self._entries.move_to_end((salt, segment_id))
        return found

    def remove(self, salt: str, segment_id: str) -> None:
        """Forget an entry, if it is there."""
        found = self._entries.pop((salt, segment_id), None)
        if found is not None:
            self._size -= _size(found)

    def of_tenant(self, salt: str) -> list[Registered]:
        """All entries of a tenant, the newest last."""
        return [entry for (owner, _), entry in self._entries.items() if owner == salt]


def segment_id(salt: str, text: str, title: str) -> str:
    """The same for the same text, title and tenant."""
    digest = hashlib.sha256()
    for part in (salt, title, text):
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return f"seg-{digest.hexdigest()[:32]}"


def _size(entry: Registered) -> int:
    return ENTRY_BYTES + len(entry.text.encode()) + len(entry.title.encode())
