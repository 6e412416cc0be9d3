"""Column mass: the mean attention probability of every key over rows, by KV head."""

from typing import Literal

from jaxtyping import Float
from torch import Tensor

from redknot.kernels.attend.rows import Rows
from redknot.kernels.paging import PagedKV
from redknot.kernels.score import reference


def column_mass(
    query: Float[Tensor, "query_head row dim"],
    kv: PagedKV,
    rows: Rows,
    lse: Float[Tensor, "query_head row"],
    *,
    scale: float,
    horizon: int | None = None,
    request: int = 0,
    impl: Literal["auto", "torch", "triton"] = "auto",
) -> Float[Tensor, "kv_head token"]:
    """Mean over the query heads of a KV head and over rows of the causal attention probability.

    A second pass over the keys with the log-sum-exp that attention found, so that scores of all
    keys never stand side by side with those of all heads. In float32, for the keys up to the last
    row; keys behind the model's own sliding window ``horizon`` get nothing.
    """
    if query.shape[0] % kv.num_kv_heads or query.shape[1] != len(rows):
        raise ValueError(
            f"query of {query.shape[0]} heads and {query.shape[1]} rows for {kv.num_kv_heads} KV"
            f" heads and {len(rows)} positions"
        )
    if lse.shape != query.shape[:2]:
        raise ValueError(f"log-sum-exp of shape {tuple(lse.shape)} for {tuple(query.shape)}")
    if not 0 <= request < kv.num_requests:
        raise ValueError(f"request {request} of {kv.num_requests}")
    if impl not in ("auto", "torch", "triton"):
        raise ValueError(f"unknown implementation {impl!r}")
    if rows.last >= kv.capacity:
        raise ValueError(f"row at position {rows.last} but only {kv.capacity} keys")
    if impl == "triton" or (impl == "auto" and query.is_cuda):
        from redknot.kernels.score import triton

        return triton.column_mass(
            query, kv, rows, lse, scale=scale, horizon=horizon, request=request
        )
    return reference.column_mass(
        query, kv, rows, lse, scale=scale, horizon=horizon, request=request
    )
