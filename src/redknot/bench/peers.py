"""Which dense peers run: those that are installed, and at great length only the fastest."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from redknot.bench.dense_attention import PeerUnavailable, peer
from redknot.bench.dense_peer import DensePeer
from redknot.bench.records import TtftRow
from redknot.execution import Executor


@dataclass(frozen=True, slots=True, eq=False)
class Peers:
    """Dense peers that can run here, and why the others cannot."""

    ready: dict[str, DensePeer]
    unavailable: dict[str, str]

    @classmethod
    def of(cls, executor: Executor, names: Sequence[str], fa3_library: Path | None) -> "Peers":
        """The peers called ``names``."""
        ready, unavailable = {}, {}
        adapter = executor.adapter
        for name in names:
            try:
                attend = peer(name, adapter.device, adapter.dtype, fa3_library)
                ready[name] = DensePeer(executor, attend)
            except PeerUnavailable as error:
                unavailable[name] = str(error)
        return cls(ready, unavailable)

    def at(self, tokens: int, limit: int | None, before: Sequence[TtftRow]) -> dict[str, DensePeer]:
        """Those that run at a length, given the rows of the length below it."""
        seconds = {row.name: row.seconds.median for row in before if row.seconds is not None}
        known = {
            name: seconds[peer_name(name)] for name in self.ready if peer_name(name) in seconds
        }
        if limit is None or tokens <= limit or not known:
            return self.ready
        best = min(known, key=known.__getitem__)
        return {best: self.ready[best]}


def peer_name(name: str) -> str:
    """What a row of a peer is called."""
    return f"dense ({name})"
