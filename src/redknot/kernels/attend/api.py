"""Meaning and dispatch of attention over gathered rows."""

from typing import Literal, overload

from jaxtyping import Float
from torch import Tensor

from redknot.kernels.attend import blocked, reference
from redknot.kernels.attend.choice import measured
from redknot.kernels.attend.plan import AttendPlan
from redknot.kernels.paging import PagedKV

Impl = Literal["auto", "reference", "torch", "triton", "flash", "flex"]
Out = Float[Tensor, "row query_head*dim"]
Lse = Float[Tensor, "query_head row"]


@overload
def attend(
    query: Tensor, kv: PagedKV, plan: AttendPlan, *, scale: float, row_block: int | None = ...,
    return_lse: Literal[False] = ..., impl: Impl = ...,
) -> Out: ...  # fmt: skip
@overload
def attend(
    query: Tensor, kv: PagedKV, plan: AttendPlan, *, scale: float, row_block: int | None = ...,
    return_lse: Literal[True], impl: Impl = ...,
) -> tuple[Out, Lse]: ...  # fmt: skip
def attend(
    query: Float[Tensor, "query_head row dim"],
    kv: PagedKV,
    plan: AttendPlan,
    *,
    scale: float,
    row_block: int | None = None,
    return_lse: bool = False,
    impl: Impl = "auto",
) -> Out | tuple[Out, Lse]:
    """Attend from the plan's rows to the keys that each KV head's reach shows.

    The rows of the query are those of the plan's parts, one part after the other; query heads of
    one KV head stand side by side. A row without a visible key gives zero and a log-sum-exp (in
    natural log, float32) of minus infinity. Pages of which no row sees a key may be absent.
    ``row_block`` caps the rows of one inner call of the torch backend. An ``impl`` that cannot run
    the call raises ValueError or ImportError; only ``auto`` chooses, by measurement.
    """
    _check(query, kv, plan)
    if not plan.num_rows:
        out = query.new_zeros(0, query.shape[0] * query.shape[2])
        return (out, query.new_zeros(query.shape[0], 0).float()) if return_lse else out
    chosen = measured(query, kv, plan) if impl == "auto" else impl
    lse: Tensor | None
    if chosen == "reference":
        out, lse = reference.attend(query, kv, plan, scale=scale)
    elif chosen == "torch":
        out, lse = blocked.attend(
            query, kv, plan, scale=scale, row_block=row_block, return_lse=return_lse
        )
    elif chosen == "triton":
        from redknot.kernels.attend import triton

        out, lse = triton.attend(query, kv, plan, scale=scale, return_lse=return_lse)
    elif chosen == "flash":
        from redknot.kernels.attend import flash

        out, lse = flash.attend(query, kv, plan, scale=scale, return_lse=return_lse)
    elif chosen == "flex":
        from redknot.kernels.attend import flex

        out, lse = flex.attend(query, kv, plan, scale=scale, return_lse=return_lse)
    else:
        raise ValueError(f"unknown implementation {impl!r}")
    return (out, lse) if return_lse and lse is not None else out


def _check(query: Tensor, kv: PagedKV, plan: AttendPlan) -> None:
    if query.shape[0] % kv.num_kv_heads or query.shape[2] != kv.key.shape[2]:
        raise ValueError(
            f"query of {query.shape[0]} heads of {query.shape[2]} for {kv.num_kv_heads} KV heads"
            f" of {kv.key.shape[2]}"
        )
    if plan.parts and plan.num_kv_heads != kv.num_kv_heads:
        raise ValueError(f"{plan.num_kv_heads} reaches for {kv.num_kv_heads} KV heads")
    if plan.num_rows != query.shape[1]:
        raise ValueError(f"a query of {query.shape[1]} rows for a plan of {plan.num_rows}")
    for part in plan.parts:
        if not 0 <= part.request < kv.num_requests:
            raise ValueError(f"request {part.request} of {kv.num_requests}")
        if part.rows.first < 0 or part.rows.last >= kv.capacity:
            raise ValueError(
                f"rows at positions {part.rows.first} to {part.rows.last} in a table of"
                f" {kv.capacity}"
            )
