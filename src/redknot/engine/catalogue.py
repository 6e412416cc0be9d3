"""Segments that tenants have registered, and what the store has of them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from redknot.engine.messages import SegmentInfo, Segments
from redknot.execution.session import Session
from redknot.segments import SegmentState

MOST_ABSENT = 1 << 14
"Segments that are remembered although the store has let go of their state."


@dataclass(eq=False)
class Catalogue:
    """What each tenant may ask about; keys of other tenants do not exist for it."""

    session: Session
    _known: dict[str, dict[str, SegmentInfo]] = field(default_factory=dict)

    def building(self, salt: str, key: str, num_tokens: int) -> None:
        """A segment is on its way."""
        info = SegmentInfo(key=key, num_tokens=num_tokens, num_bytes=0, state="building")
        self._known.setdefault(salt, {})[key] = info
        most = MOST_ABSENT + self.session.store.usage().num_entries
        if sum(map(len, self._known.values())) > most:
            self._forget_absent()

    def ready(self, salt: str, key: str, state: SegmentState) -> SegmentInfo:
        """Its state is there."""
        device = next(iter(state.planes.values())).device
        on_device = device.type == self.session.model.adapter.device.type
        info = SegmentInfo(
            key=key,
            num_tokens=len(state),
            num_bytes=state.num_bytes,
            state="ready",
            tier="device" if on_device else "host",
        )
        self._known.setdefault(salt, {})[key] = info
        return info

    def failed(self, salt: str, key: str) -> None:
        """It was not built."""
        self._known.get(salt, {}).pop(key, None)

    def forget(self, salt: str, key: str) -> bool:
        """Forget a segment and its state; whether the tenant had one."""
        if self._known.get(salt, {}).pop(key, None) is None:
            return False
        self.session.store.delete(bytes.fromhex(key))
        return True

    def _forget_absent(self) -> None:
        stored = set(map(bytes.hex, self.session.store.keys()))
        for salt, mine in list(self._known.items()):
            for key, info in list(mine.items()):
                if info.state != "building" and key not in stored:
                    del mine[key]
            if not mine:
                del self._known[salt]

    def answer(self, request_id: str, salt: str, keys: Sequence[str] | None) -> Segments:
        """What is known under ``keys``, or all of a tenant."""
        mine = self._known.get(salt, {})
        stored = set(map(bytes.hex, self.session.store.keys()))
        found = [mine[key] for key in (mine if keys is None else keys) if key in mine]
        return Segments(
            request_id=request_id,
            segments=tuple(
                info
                if info.state == "building" or info.key in stored
                else SegmentInfo(
                    key=info.key, num_tokens=info.num_tokens, num_bytes=0, state="absent"
                )
                for info in found
            ),
        )
