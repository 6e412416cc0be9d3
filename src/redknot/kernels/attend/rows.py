"""Query rows of one stage and what each KV head shows them."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from redknot.kernels.upload import upload

NO_END = 1 << 60
"Beyond every position."


class Reach(NamedTuple):
    """What one KV head shows to the query at position p.

    ``{0..sink-1}`` and ``{p-window+1..p}`` as a set, cut to ``{p-horizon+1..p}``.
    """

    window: int | None = None  # tokens, the query's own included; None shows everything
    sink: int = 0  # first tokens of the prompt
    horizon: int | None = None  # the model's own sliding window, in tokens

    @property
    def span(self) -> int | None:
        """The last positions that are shown without a gap, in tokens; None is all."""
        limits = [limit for limit in (self.window, self.horizon) if limit is not None]
        return min(limits) if limits else None

    def spans(self, first: int, stop: int | None = None) -> list[tuple[int, int]]:
        """Spans of positions that some row from ``first`` on sees, before ``stop`` (None: no end).

        In order and apart from each other; without an end the last one reaches to `NO_END`.
        """
        end = NO_END if stop is None else stop
        if first >= end or self.horizon == 0:
            return []
        oldest = 0 if self.horizon is None else max(0, first - self.horizon + 1)
        sink = 0 if self.window is None else min(self.sink, end)
        start = oldest if self.window is None else max(oldest, first - self.window + 1)
        if self.window != 0 and start <= sink:
            return [(oldest, end)]
        spans = [(oldest, sink), (start if self.window != 0 else end, end)]
        return [span for span in spans if span[0] < span[1]]


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Sorted positions of query rows, on the host for planning and on the device for masks."""

    host: Int[Tensor, "row"]
    device: Int[Tensor, "row"]

    @classmethod
    def at(cls, positions: Int[Tensor, "row"], device: torch.device) -> "Rows":
        """Rows at host ``positions`` (sorted, unique)."""
        return cls(positions, upload(positions, device))

    def __len__(self) -> int:
        return self.host.shape[0]

    def between(self, start: int, stop: int) -> "Rows":
        """The rows with index ``start`` to ``stop``."""
        return Rows(self.host[start:stop], self.device[start:stop])

    def before(self, position: int) -> int:
        """How many rows stand before ``position``."""
        return int(torch.searchsorted(self.host, position))

    @property
    def first(self) -> int:
        """Position of the first row."""
        return int(self.host[0])

    @property
    def last(self) -> int:
        """Position of the last row."""
        return int(self.host[-1])

    @property
    def consecutive(self) -> bool:
        """Whether no position between the first and the last row is left out."""
        return self.last - self.first + 1 == len(self)
