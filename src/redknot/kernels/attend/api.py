"""Meaning and dispatch of attention over gathered rows."""

from collections.abc import Sequence
from typing import Literal

from jaxtyping import Float
from torch import Tensor

from redknot.kernels.attend import blocked, reference
from redknot.kernels.attend.rows import Reach, Rows

__all__ = ["Reach", "Rows", "attend"]


def attend(
    query: Float[Tensor, "query_head row dim"],
    key: Float[Tensor, "kv_head token dim"],
    value: Float[Tensor, "kv_head token dim"],
    rows: Rows,
    reaches: Sequence[Reach],
    *,
    scale: float,
    row_block: int | None = None,
    impl: Literal["auto", "reference", "torch"] = "auto",
) -> Float[Tensor, "row query_head*dim"]:
    """Attend from ``rows`` to the keys that each KV head's reach shows.

    Key j stands at position j; row i at ``rows.host[i]``, which must be below the number of keys.
    ``row_block`` caps the rows of one inner call (memory and wasted pairs grow with it). Query
    heads of one KV head stand side by side. A row without a visible key gives zero.
    """
    if query.shape[0] % key.shape[0] or len(reaches) != key.shape[0]:
        raise ValueError(
            f"{query.shape[0]} query heads, {key.shape[0]} KV heads, {len(reaches)} reaches"
        )
    if rows.last >= key.shape[1]:
        raise ValueError(f"row at position {rows.last} but only {key.shape[1]} keys")
    if impl == "reference":
        return reference.attend(query, key, value, rows, reaches, scale=scale)
    return blocked.attend(query, key, value, rows, reaches, scale=scale, row_block=row_block)
