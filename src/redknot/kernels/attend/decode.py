"""Attention of one new row of every request: split over keys in units of equal length."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from redknot.kernels.attend.api import attend
from redknot.kernels.attend.plan import AttendPlan, Part, limits
from redknot.kernels.attend.rows import Reach, Rows
from redknot.kernels.paging import PagedKV

MIN_UNIT_TOKENS = 256
"Shorter units cost more in merging than they gain in balance."


@dataclass(frozen=True, slots=True, eq=False)
class DecodePlan:
    """How a decode step over some requests is split; stays valid while they grow.

    Only the balance depends on the lengths it was made for, so a captured graph may replay it; the
    kernel reads the positions of the step from the device.
    """

    units: Int[Tensor, "unit 4"]
    "Stream, split, splits of the stream, slot of the partial result; int32, longest first."
    split_streams: Int[Tensor, "stream 3"]
    "Stream, its splits, its first slot, for streams of more than one split; int32."
    reaches: Int[Tensor, "kv_head 3"]
    "Window, sink, horizon; int32."
    pattern: tuple[Reach, ...]
    num_slots: int

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        reaches: tuple[Reach, ...],
        device: torch.device,
        *,
        target_units: int = 264,
    ) -> "DecodePlan":
        """Split requests of ``lengths`` tokens (the new one included) into about equal units."""
        limit = torch.tensor([limits(reach) for reach in reaches])
        tokens = torch.tensor(list(lengths))[:, None]
        span = torch.minimum(limit[:, 0], limit[:, 2])
        start = (tokens - span).clamp(min=0)
        sinks = torch.minimum(limit[:, 1], start) - (tokens - limit[:, 2]).clamp(min=0)
        seen = (tokens - start + sinks.clamp(min=0)).flatten()
        unit = max(MIN_UNIT_TOKENS, -(-int(seen.sum()) // target_units))
        splits = (-(-seen // unit)).clamp(min=1)
        stream = torch.repeat_interleave(torch.arange(len(seen)), splits)
        first = splits.cumsum(0) - splits
        split = torch.arange(len(stream)) - first[stream]
        slots = torch.where(splits > 1, splits, 0)
        slot = (slots.cumsum(0) - slots)[stream] + split
        units = torch.stack([stream, split, splits[stream], slot], 1)
        order = torch.argsort((seen / splits)[stream], descending=True, stable=True)
        many = (splits > 1).nonzero()[:, 0]
        joined = torch.stack([many, splits[many], (slots.cumsum(0) - slots)[many]], 1)
        return cls(
            units[order].to(device, torch.int32),
            joined.to(device, torch.int32),
            limit.to(device, torch.int32),
            reaches,
            int(slots.sum()),
        )


def attend_decode(
    query: Float[Tensor, "request query_head dim"],
    kv: PagedKV,
    plan: DecodePlan,
    positions: Int[Tensor, "request"],
    *,
    scale: float,
    impl: Literal["auto", "reference", "torch", "triton"] = "auto",
) -> Float[Tensor, "request query_head*dim"]:
    """Attention of one row of each request, at ``positions`` (int32), to what it sees.

    Partial results are merged by log-sum-exp in float32. The triton backend reads positions on the
    device only, so that a step can be captured in a CUDA graph; the others wait for them.
    """
    if len(query) != kv.num_requests or len(positions) != kv.num_requests:
        raise ValueError(
            f"{len(query)} rows at {len(positions)} positions for {kv.num_requests} requests"
        )
    if len(plan.pattern) != kv.num_kv_heads:
        raise ValueError(f"{len(plan.pattern)} reaches for {kv.num_kv_heads} KV heads")
    if impl == "triton" or (impl == "auto" and query.is_cuda):
        from redknot.kernels.attend import decode_triton

        return decode_triton.attend_decode(query, kv, plan, positions, scale=scale)
    parts = [
        Part(request, Rows.at(torch.tensor([position]), query.device), plan.pattern)
        for request, position in enumerate(positions.tolist())
    ]
    rows = query.transpose(0, 1)
    return attend(rows, kv, AttendPlan.of(*parts), scale=scale, impl=impl)
