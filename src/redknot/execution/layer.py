"""One layer for a set of rows: the only place where a layer's parts are put together."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from jaxtyping import Bool, Float, Int
from torch import Tensor

from redknot.execution.cache import Pages
from redknot.execution.clock import Clock
from redknot.execution.parts import EAGER, Parts
from redknot.execution.visibility import Visibility
from redknot.kernels.append import append
from redknot.kernels.attend import (
    AttendPlan,
    DecodePlan,
    Impl,
    Part,
    Reach,
    Rows,
    attend,
    attend_decode,
)
from redknot.kernels.gather_ffn import ROW_BLOCK, gather_ffn
from redknot.kernels.paging import PagedKV
from redknot.kernels.relocate import rotate
from redknot.models import Adapter, Layer

Recorder = Callable[[int, Tensor, Tensor], None]
"Takes (layer, un-rotated keys, values) of the rows."


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """Rows with their rotary table and plans, made once for all layers that share them."""

    rows: Rows
    cosine: Float[Tensor, "row half"]
    sine: Float[Tensor, "row half"]
    _plans: dict[tuple[int, tuple[Reach, ...], tuple[Reach, ...]], AttendPlan] = field(
        default_factory=dict
    )

    @classmethod
    def at(cls, adapter: Adapter, positions: Int[Tensor, "row"]) -> "Placed":
        """Rows at sorted host ``positions``."""
        return cls.of(adapter, Rows.at(positions, adapter.device))

    @classmethod
    def of(cls, adapter: Adapter, rows: Rows) -> "Placed":
        """Rows that are on host and device already."""
        return cls(rows, *adapter.rotary.table(rows.device))

    def tail(self, count: int) -> "Placed":
        """The last ``count`` rows."""
        rows = self.rows.between(len(self.rows) - count, len(self.rows))
        return Placed(rows, self.cosine[-count:], self.sine[-count:])

    def rotate(self, states: Float[Tensor, "head row dim"]) -> Float[Tensor, "head row dim"]:
        """Turn queries or keys of these rows to their positions."""
        return rotate(states, self.cosine, self.sine)

    def plan(self, sight: Visibility, layer: int) -> AttendPlan:
        """Attention of these rows, each under the reach of its phase."""
        pattern = (sight.border, sight.prefill[layer], sight.decode[layer])
        found = self._plans.get(pattern)
        if found is None:
            split = self.rows.before(sight.border)
            context, later = self.rows.between(0, split), self.rows.between(split, len(self.rows))
            found = AttendPlan.of(Part(0, context, pattern[1]), Part(0, later, pattern[2]))
            self._plans[pattern] = found
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Trip:
    """What is the same for all layers of one pass."""

    cache: Pages
    sight: Visibility
    impl: Impl = "auto"
    row_block: int | None = None
    record: Recorder | None = None
    parts: Parts = EAGER
    clock: Clock | None = None

    def spent_on(self, part: str) -> None:
        """Charge the time since the last mark."""
        if self.clock is not None:
            self.clock.part(part)


class Attention(NamedTuple):
    """What attention of some rows gives."""

    out: Float[Tensor, "row query_head*dim"]
    query: Float[Tensor, "query_head row dim"]
    "Rotated."
    lse: Float[Tensor, "query_head row"] | None


def attention(
    trip: Trip,
    index: int,
    layer: Layer,
    placed: Placed,
    hidden: Float[Tensor, "row hidden"],
    *,
    publish: Bool[Tensor, "group row"] | None = None,
    tail: int | None = None,
    return_lse: bool = False,
) -> Attention:
    """Write the rows' K/V, then attend.

    With ``tail`` only the last rows attend: all that is needed where no later layer reads the rest.
    """
    written, project = placed, trip.parts.project
    if tail is not None:
        placed, project = placed.tail(tail), trip.parts.project_tail
    query, key, value = project(layer, hidden, placed.cosine, placed.sine)
    trip.spent_on("project")
    if trip.record is not None:
        trip.record(index, key, value)
    angles = written.cosine, written.sine
    trip.cache.write(index, written.rows.device, key, value, angles, publish)
    trip.spent_on("append")
    kv, plan = trip.cache.layer(index), placed.plan(trip.sight, index)
    scale, row_block, impl = layer.shape.scale, trip.row_block, trip.impl
    lse = None
    if return_lse:
        out, lse = attend(
            query, kv, plan, scale=scale, row_block=row_block, impl=impl, return_lse=True
        )
    else:
        out = attend(query, kv, plan, scale=scale, row_block=row_block, impl=impl)
    trip.spent_on("attend")
    return Attention(out, query, lse)


def finish(
    layer: Layer,
    hidden: Float[Tensor, "row hidden"],
    attended: Float[Tensor, "row query_head*dim"],
    fed: Int[Tensor, "some"] | None = None,
    parts: Parts = EAGER,
) -> Float[Tensor, "row hidden"]:
    """Output projection and FFN; only the rows with index ``fed`` run the FFN, None is all."""
    if fed is not None:
        hidden = parts.add_attention(layer, hidden, attended)
        return gather_ffn(hidden, partial(parts.ffn, layer), fed)
    if len(hidden) <= ROW_BLOCK:
        return parts.add_both(layer, hidden, attended)
    for rows, found in zip(hidden.split(ROW_BLOCK), attended.split(ROW_BLOCK), strict=True):
        rows.copy_(parts.add_both(layer, rows, found))
    return hidden


def decode_layer(
    layer: Layer,
    kv: PagedKV,
    plan: DecodePlan,
    positions: Int[Tensor, "request"],
    angles: tuple[Float[Tensor, "request half"], Float[Tensor, "request half"]],
    hidden: Float[Tensor, "request hidden"],
    parts: Parts,
) -> Float[Tensor, "request hidden"]:
    """One new row of each of several requests; a GPU reads nothing back, so a graph can hold it."""
    query, key, value = parts.project(layer, hidden, *angles)
    append(kv, key, value, positions, *angles, one_each=True)
    rows = query.transpose(0, 1)
    out = attend_decode(rows, kv, plan, positions, scale=layer.shape.scale)
    return finish(layer, hidden, out, parts=parts)
