"""One layer for a set of rows: the only place where a layer's parts are put together."""

from collections.abc import Callable
from dataclasses import dataclass

from jaxtyping import Bool, Float, Int
from torch import Tensor

from redknot.execution.cache import PromptCache
from redknot.execution.retained import RetainedCache
from redknot.execution.visibility import Visibility
from redknot.kernels.attend import Rows
from redknot.kernels.relocate import rotate
from redknot.models import Adapter, Layer

Recorder = Callable[[int, Tensor, Tensor], None]
"Takes (layer, un-rotated keys, values) of the rows."


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """Rows with their rotary table, made once for all layers that share them."""

    rows: Rows
    cosine: Float[Tensor, "row half"]
    sine: Float[Tensor, "row half"]

    @classmethod
    def at(cls, adapter: Adapter, positions: Int[Tensor, "row"]) -> "Placed":
        """Rows at sorted host ``positions``."""
        rows = Rows.at(positions, adapter.device)
        return cls(rows, *adapter.rotary.table(rows.device))

    def tail(self, count: int) -> "Placed":
        """The last ``count`` rows."""
        rows = self.rows.between(len(self.rows) - count, len(self.rows))
        return Placed(rows, self.cosine[-count:], self.sine[-count:])

    def rotate(self, states: Float[Tensor, "head row dim"]) -> Float[Tensor, "head row dim"]:
        """Turn queries or keys of these rows to their positions."""
        return rotate(states, self.cosine, self.sine)


@dataclass(frozen=True, slots=True, eq=False)
class Trip:
    """What is the same for all layers of one pass."""

    cache: PromptCache | RetainedCache
    sight: Visibility
    row_block: int | None = None
    record: Recorder | None = None


def attention(
    trip: Trip,
    index: int,
    layer: Layer,
    placed: Placed,
    hidden: Float[Tensor, "row hidden"],
    *,
    publish: Bool[Tensor, "group row"] | None = None,
    tail: int | None = None,
) -> tuple[Float[Tensor, "tail query_head*dim"], Float[Tensor, "query_head tail dim"]]:
    """Write the rows' K/V, then attend; returns attention outputs and rotated queries.

    With ``tail`` only the last rows attend: all that is needed where no later layer reads the rest.
    """
    normed = layer.attention_input(hidden)
    key, value = layer.keys(normed), layer.values(normed)
    if trip.record is not None:
        trip.record(index, key, value)
    trip.cache.write(index, placed.rows, placed.rotate(key), value, publish)
    if tail is not None:
        placed, normed = placed.tail(tail), normed[-tail:]
    query = placed.rotate(layer.queries(normed))
    attended = trip.cache.attend(
        index,
        query,
        placed.rows,
        trip.sight,
        scale=layer.shape.scale,
        row_block=trip.row_block,
    )
    return attended, query


def finish(
    layer: Layer,
    hidden: Float[Tensor, "row hidden"],
    attended: Float[Tensor, "row query_head*dim"],
    fed: Int[Tensor, "some"] | None = None,
) -> Float[Tensor, "row hidden"]:
    """Output projection and FFN; only the rows with index ``fed`` run the FFN, None is all."""
    hidden = hidden + layer.attention_output(attended)
    if fed is None:
        return hidden + layer.ffn(hidden)
    hidden[fed] += layer.ffn(hidden[fed])
    return hidden
