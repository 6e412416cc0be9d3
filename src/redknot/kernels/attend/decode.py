"""Attention of one new row of every request: split over keys in units of equal length."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from redknot.kernels.attend.api import attend
from redknot.kernels.attend.plan import AttendPlan, Part, limits
from redknot.kernels.attend.rows import Reach, Rows
from redknot.kernels.paging import PagedKV
from redknot.kernels.upload import upload

MIN_UNIT_TOKENS = 256
"Shorter units cost more in merging than they gain in balance."
UNUSED = -1
"Entry of a plan where there is nothing to do."

Reaches = tuple[Reach, ...]
"Of the KV heads of one request."


@dataclass(frozen=True, slots=True, eq=False)
class DecodePlan:
    """How a decode step over some requests is split; stays valid while they grow.

    Only the balance depends on the lengths it was made for, so a captured graph may replay it; the
    kernel reads the positions of the step from the device. The sizes of its tensors depend on the
    reaches, the number of requests and the target alone, so `refill` can follow requests that come
    and go. A request of length 0 is an idle slot: its position is not read, its row is zero.
    """

    units: Int[Tensor, "unit 4"]
    "Stream, split, splits of the stream (0 if idle), slot of the partial result; int32."
    split_streams: Int[Tensor, "stream 3"]
    "Stream, its splits, its first slot, for streams of more than one split; int32."
    reaches: Int[Tensor, "stream 3"]
    "Window, sink, horizon; int32."
    pattern: tuple[Reaches, ...]
    "One for each request."
    num_slots: int
    "Partial results that the plan has room for."
    _last: dict[str, "_HostRows"] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        reaches: Reaches | Sequence[Reaches],
        device: torch.device,
        *,
        target_units: int = 264,
    ) -> "DecodePlan":
        """Split requests of ``lengths`` tokens (the new one included) into about equal units.

        ``reaches`` are those of all requests, or those of each. Units come longest first; behind
        them, and behind the streams that are split, the entries are `UNUSED`.
        """
        pattern = _pattern(lengths, reaches)
        if target_units < 1 or min(lengths, default=0) < 0:
            raise ValueError(f"{target_units} units for requests of {list(lengths)} tokens")
        heads = len(pattern[0]) if pattern else 0
        numbers = [limits(reach) for own in pattern for reach in own]
        limit = torch.tensor(numbers, dtype=torch.int64).view(-1, 3)
        tokens = torch.tensor(list(lengths), dtype=torch.int64).repeat_interleave(heads)
        seen = _seen(tokens, limit)
        unit = max(MIN_UNIT_TOKENS, -(-int(seen.sum()) // target_units))
        splits = (-(-seen // unit)).clamp(min=1)
        stream = torch.repeat_interleave(torch.arange(len(seen)), splits)
        first = splits.cumsum(0) - splits
        split = torch.arange(len(stream)) - first[stream]
        slots = torch.where(splits > 1, splits, 0)
        slot = (slots.cumsum(0) - slots)[stream] + split
        units = torch.stack([stream, split, torch.where(tokens > 0, splits, 0)[stream], slot], 1)
        order = torch.argsort((seen / splits)[stream], descending=True, stable=True)
        many = (splits > 1).nonzero()[:, 0]
        joined = torch.stack([many, splits[many], (slots.cumsum(0) - slots)[many]], 1)
        room = _Room.of(limit, target_units)
        return cls(
            upload(_filled(units[order], room.units), device),
            upload(_filled(joined, room.split_streams), device),
            upload(limit.to(torch.int32), device),
            pattern,
            room.slots,
        )

    def refill(self, other: "DecodePlan") -> None:
        """Take over the units of ``other``, on any device, in place; the reaches must be the same.

        In the order of the current stream: a graph that is replayed on it afterwards runs them.
        """
        if self.pattern != other.pattern:
            raise ValueError("plans of other requests: their reaches differ")
        sizes = [(len(p.units), len(p.split_streams), p.num_slots) for p in (self, other)]
        if sizes[0] != sizes[1]:
            raise ValueError(f"a plan with room for {sizes[1]} in one with room for {sizes[0]}")
        self.units.copy_(other.units, non_blocking=True)
        self.split_streams.copy_(other.split_streams, non_blocking=True)
        self._last.clear()

    def on_host(self, positions: Int[Tensor, "request"]) -> "_HostRows":
        """The rows of a step as prefill's attention plans them; waits for the device.

        Made once for all layers that share this plan and step.
        """
        at, last = positions.tolist(), self._last.get("rows")
        if last is None or last.positions != at:
            last = _HostRows.of(at, self.live(), self.pattern, positions.device)
            self._last["rows"] = last
        return last

    def live(self) -> list[int]:
        """Requests that are not idle; waits for the device."""
        units = self.units[self.units[:, 2] > 0, 0].tolist()
        return sorted({stream // len(self.pattern[0]) for stream in units})


class _HostRows(NamedTuple):
    """One row of each request that is not idle."""

    positions: list[int]
    live: list[int]
    plan: AttendPlan

    @classmethod
    def of(
        cls,
        positions: list[int],
        live: list[int],
        pattern: tuple[Reaches, ...],
        device: torch.device,
    ) -> "_HostRows":
        """Of the requests ``live``."""
        parts = [
            Part(request, Rows.at(torch.tensor([positions[request]]), device), pattern[request])
            for request in live
        ]
        return cls(positions, live, AttendPlan.of(*parts))


class _Room(NamedTuple):
    """Entries that a plan needs at most, whatever the lengths."""

    units: int
    split_streams: int
    slots: int

    @classmethod
    def of(cls, limit: Int[Tensor, "stream 3"], target: int) -> "_Room":
        """For streams of such reaches.

        Let x be the keys of a stream over those of a unit: all x sum up to ``target`` at most, and
        a stream has ceil(x) < x + 1 units, or one where x is 0. So n streams have at most
        ``target + n - 1``. Those that are split have x > 1, so there are fewer than ``target``, and
        they see more than the shortest unit, which ``sink`` and ``span`` together may rule out.
        """
        span = torch.minimum(limit[:, 0], limit[:, 2])
        most = span + torch.minimum(limit[:, 1], limit[:, 2] - span)
        split = min(int((most > MIN_UNIT_TOKENS).sum()), target - 1)
        return cls(target + len(limit) - 1, split, target + split - 1 if split else 0)


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

    Partial results are merged by log-sum-exp in float32. Rows of idle slots are zero. The triton
    backend reads positions and plan on the device only, so that a step can be captured in a CUDA
    graph; the others wait for them.
    """
    if len(query) != kv.num_requests or len(positions) != kv.num_requests:
        raise ValueError(
            f"{len(query)} rows at {len(positions)} positions for {kv.num_requests} requests"
        )
    if len(plan.pattern) != kv.num_requests:
        raise ValueError(f"a plan of {len(plan.pattern)} requests for {kv.num_requests}")
    if len(plan.reaches) != len(kv.table):
        raise ValueError(f"{len(plan.pattern[0])} reaches for {kv.num_kv_heads} KV heads")
    if impl == "triton" or (impl == "auto" and query.is_cuda):
        from redknot.kernels.attend import decode_triton

        return decode_triton.attend_decode(query, kv, plan, positions, scale=scale)
    step = plan.on_host(positions)
    if len(step.live) == len(query):
        return attend(query.transpose(0, 1), kv, step.plan, scale=scale, impl=impl)
    rows = query[step.live].transpose(0, 1)
    out = query.new_zeros(len(query), query.shape[1] * query.shape[2])
    out[step.live] = attend(rows, kv, step.plan, scale=scale, impl=impl)
    return out


def _pattern(lengths: Sequence[int], reaches: Reaches | Sequence[Reaches]) -> tuple[Reaches, ...]:
    """The reaches of each request."""
    alike = tuple(reach for reach in reaches if isinstance(reach, Reach))
    own = tuple(tuple(request) for request in reaches if not isinstance(request, Reach))
    pattern = own or (alike,) * len(lengths)
    if len(pattern) != len(lengths) or len({len(request) for request in pattern}) > 1:
        heads = [len(request) for request in pattern]
        raise ValueError(f"reaches of {heads} KV heads for {len(lengths)} requests")
    return pattern


def _seen(tokens: Int[Tensor, "stream"], limit: Int[Tensor, "stream 3"]) -> Int[Tensor, "stream"]:
    """Keys that the last of ``tokens`` sees."""
    start = (tokens - torch.minimum(limit[:, 0], limit[:, 2])).clamp(min=0)
    sinks = torch.minimum(limit[:, 1], start) - (tokens - limit[:, 2]).clamp(min=0)
    return tokens - start + sinks.clamp(min=0)


def _filled(entries: Int[Tensor, "entry field"], room: int) -> Int[Tensor, "room field"]:
    """``entries`` as int32, then unused ones."""
    filled = torch.full((room, entries.shape[1]), UNUSED, dtype=torch.int32)
    filled[: len(entries)] = entries
    return filled
