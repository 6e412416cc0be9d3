"""Work of one attention call: parts of rows that share a request and a reach pattern."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from redknot.kernels.attend.rows import Reach, Rows
from redknot.kernels.upload import upload

UNLIMITED = 2**30
"A window or horizon that hides nothing, in tokens."


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Rows of one request that see by one pattern of reaches."""

    request: int
    rows: Rows
    reaches: tuple[Reach, ...]
    "One for each KV head."


@dataclass(frozen=True, slots=True, eq=False)
class AttendPlan:
    """Parts in the order of the query's rows; made once for all layers of a stage that share it.

    What kernels need of it on the device is made at first use and kept.
    """

    parts: tuple[Part, ...]
    _made: dict[object, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, *parts: Part) -> "AttendPlan":
        """Plan ``parts``; those without rows are left out."""
        kept = tuple(part for part in parts if len(part.rows))
        if len({len(part.reaches) for part in kept}) > 1:
            raise ValueError("parts of one call have equally many KV heads")
        return cls(kept)

    @property
    def num_rows(self) -> int:
        """Rows of all parts."""
        return sum(len(part.rows) for part in self.parts)

    @property
    def num_kv_heads(self) -> int:
        """KV heads of every part."""
        return len(self.parts[0].reaches) if self.parts else 0

    @property
    def positions(self) -> Int[Tensor, "row"]:
        """Of all rows, int32, on the device."""
        return self._once("positions", self._positions)

    @property
    def lengths(self) -> Int[Tensor, "part kv_head"]:
        """Keys up to the last row of each part, int32, once for every KV head."""
        return self._once("lengths", self._lengths)

    def rows_of(self, index: int) -> slice:
        """Where the rows of a part stand among all rows."""
        first = sum(len(part.rows) for part in self.parts[:index])
        return slice(first, first + len(self.parts[index].rows))

    def alone(self, index: int, heads: range) -> "AttendPlan":
        """One part for some KV heads, as the only request."""
        part = self.parts[index]
        reaches = part.reaches[heads.start : heads.stop]
        return self._once(
            (index, heads.start, heads.stop), lambda: AttendPlan.of(Part(0, part.rows, reaches))
        )

    @property
    def fullness(self) -> float:
        """Mean of the keys that rows and KV heads span over the most that one spans, about."""
        return self._once("fullness", self._fullness)

    def tiles(self, group: int, height: int) -> "Tiles":
        """Work of a kernel that takes ``height`` packed rows of ``group`` query heads at once."""
        return self._once((group, height), lambda: Tiles.of(self, group, height))

    def _positions(self) -> Int[Tensor, "row"]:
        positions = [part.rows.device for part in self.parts]
        if len(positions) == 1:  # a buffer of int32 is read where it stands: graphs rely on it
            return positions[0].to(torch.int32)
        return torch.cat(positions).to(torch.int32)

    def _lengths(self) -> Int[Tensor, "part kv_head"]:
        tokens = [[part.rows.last + 1] * self.num_kv_heads for part in self.parts]
        return upload(torch.tensor(tokens, dtype=torch.int32), self.parts[0].rows.device.device)

    def _fullness(self) -> float:
        spans = [
            (part.rows.host + 1).clamp(max=UNLIMITED if reach.span is None else reach.span)
            for part in self.parts
            for reach in part.reaches
        ]
        keys = torch.cat(spans)
        return float(keys.sum()) / (len(keys) * max(1, int(keys.max())))

    def _once(self, key: object, make: Callable[[], Any]) -> Any:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


@dataclass(frozen=True, slots=True, eq=False)
class Tiles:
    """Tiles of a launch, longest first, and the tables that they point into, all int32."""

    positions: Int[Tensor, "row"]
    parts: Int[Tensor, "part 3"]
    "First row, number of rows, request."
    reaches: Int[Tensor, "part kv_head 3"]
    "Window, sink, horizon."
    work: Int[Tensor, "tile 3"]
    "Part, KV head, first packed row."

    @classmethod
    def of(cls, plan: AttendPlan, group: int, height: int) -> "Tiles":
        """Cut the parts of ``plan``; sorting and cutting happen on the device of the rows."""
        parts, positions = plan.parts, plan.positions
        device = positions.device
        reaches = upload(
            torch.tensor(
                [[limits(reach) for reach in part.reaches] for part in parts], dtype=torch.int32
            ),
            device,
        )
        table, work, cost, first = [], [], [], 0
        for index, part in enumerate(parts):
            count, heads = len(part.rows), len(part.reaches)
            table.append((first, count, part.request))
            own = positions[first : first + count]
            starts = torch.arange(0, count * group, height, device=device, dtype=torch.int32)
            ends = own[((starts + height).clamp(max=count * group) - 1) // group] + 1
            window, sink, horizon = reaches[index].T[:, None, :]
            span = torch.minimum(window, horizon)
            seen = ends[:, None] - (own[starts // group][:, None] - span + 1).clamp(min=0)
            cost.append((seen + torch.minimum(sink, span)).flatten())
            head = torch.arange(heads, device=device, dtype=torch.int32)
            tile = torch.broadcast_tensors(torch.full_like(head, index), head, starts[:, None])
            work.append(torch.stack(tile, -1).flatten(0, 1))
            first += count
        order = torch.argsort(torch.cat(cost), descending=True, stable=True)
        return cls(
            positions,
            upload(torch.tensor(table, dtype=torch.int32), device),
            reaches,
            torch.cat(work)[order].contiguous(),
        )


def limits(reach: Reach) -> tuple[int, int, int]:
    """Window, sink and horizon as numbers; sinks of a reach without a window say nothing."""

    def limit(tokens: int | None) -> int:
        return UNLIMITED if tokens is None else min(tokens, UNLIMITED)

    sink = 0 if reach.window is None else min(reach.sink, UNLIMITED)
    return limit(reach.window), sink, limit(reach.horizon)
