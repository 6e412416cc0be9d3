"""The recovery pass: rows flow as a policy says, and the executed plan is written down."""

from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from redknot.execution.layer import Placed, Trip, attention, finish
from redknot.kernels.attend import Rows
from redknot.kernels.upload import upload
from redknot.models import Adapter, Layer
from redknot.recovery import LayerPlan, Layout, Plan, Policy
from redknot.recovery.flops import question_rows
from redknot.recovery.policy import Stage
from redknot.recovery.selection import Selection, select, skip


class RequestSignals:
    """Signals of one request, measured when a policy asks."""

    def __init__(
        self, mass: Float[Tensor, "layer group token"] | None, groups: Bool[Tensor, "layer group"]
    ) -> None:
        self._mass, self._groups = mass, groups
        self.measure_deviation: Callable[[], Float[Tensor, "token"]] = _unset
        self.measure_output: Callable[[], Float[Tensor, "row"]] = _unset
        self.ranked = 0

    def forget(self) -> None:
        """Let go of the layer that was measured, and with it of the request's cache."""
        self.measure_deviation, self.measure_output = _unset, _unset

    def global_groups(self) -> Bool[Tensor, "layer group"]:
        """Groups that see everything."""
        return self._groups

    def probe_mass(self) -> Float[Tensor, "layer group token"]:
        """Attention of the question pass; ValueError where the policy declared no use of it."""
        if self._mass is None:
            raise ValueError("a policy that reads probe_mass must set uses_probe")
        return self._mass

    def deviation(self) -> Float[Tensor, "token"]:
        """Distance of fresh K and V from the reused ones in this layer."""
        return self.measure_deviation()

    def output_norm(self) -> Float[Tensor, "row"]:
        """Norm of the attention output of this layer's rows."""
        return self.measure_output()


@dataclass(frozen=True, slots=True, eq=False)
class Executed:
    """What a pass did, some of it still on the device."""

    policy: str
    num_tokens: int
    probe_rows: int
    chunks: list[list[LayerPlan]] = field(default_factory=list)

    def plan(self) -> Plan:
        """All of it on the host."""
        layers = tuple(_join(parts) for parts in zip(*self.chunks, strict=True))
        return Plan(self.policy, self.num_tokens, layers, self.probe_rows)


class Recovery:
    """One request's way through the layers under ``policy``."""

    def __init__(
        self,
        adapter: Adapter,
        trip: Trip,
        token_ids: Int[Tensor, "token"],
        layout: Layout,
        policy: Policy,
        global_groups: Tensor,
        mass: Float[Tensor, "layer group token"] | None,
    ) -> None:
        self._adapter, self._policy = adapter, policy
        self._layout = layout.on(adapter.device)
        self._trip = trip
        self._token_ids = upload(token_ids, adapter.device)
        self._signals = RequestSignals(mass, upload(global_groups, adapter.device))
        probe_rows = len(question_rows(layout)) if mass is not None else 0
        self.executed = Executed(policy.describe(), layout.num_tokens, probe_rows)

    def run(self, start: int, stop: int) -> Generator[int, None, Float[Tensor, "row hidden"]]:
        """Run the rows of positions ``start`` to ``stop`` through all layers.

        Yields behind every layer how many rows it had; returns the last row's output of the last
        layer. Chunks must come in order and end with the prompt; only policies that are not
        adaptive may run in more than one.
        """
        try:
            return (yield from self._run(start, stop))
        finally:  # also where the work is left in the middle: they refer to pages
            self._signals.forget()

    def _run(self, start: int, stop: int) -> Generator[int, None, Float[Tensor, "row hidden"]]:
        start = max(start, self._layout.exact)
        placed = Placed.at(self._adapter, torch.arange(start, stop))
        stage = self._first_stage(placed.rows)
        hidden = self._adapter.embed(self._token_ids[start:stop])
        layers: list[LayerPlan] = []
        for index, layer in enumerate(self._adapter.layers):
            stage = replace(stage, layer=index)
            self._signals.ranked = 0
            self._signals.measure_deviation = partial(self._deviation, index, layer, placed, hidden)
            chosen = select(self._policy, stage)
            if chosen is not None:
                before, placed = placed, self._placed(chosen, start, stop)
                stage = replace(stage, active=chosen.active, rows=placed.rows.device)
                hidden = hidden[torch.searchsorted(before.rows.device, placed.rows.device)]
                self._trip.spent_on("select")
            if not len(stage.rows):  # a chunk whose tokens have all left
                layers.append(LayerPlan(placed.rows.host))
                continue
            publish = self._policy.publish(stage)
            last = index == stage.num_layers - 1
            attended = attention(
                self._trip, index, layer, placed, hidden, publish=publish, tail=1 if last else None
            ).out
            if last:
                fed, hidden = None, hidden[-1:].clone()  # one row as any other to a compiler
            else:
                fed = self._feed(stage, attended)
            index_in = None if fed is None else torch.searchsorted(stage.rows, fed)
            hidden = finish(layer, hidden, attended, index_in, self._trip.parts)
            self._trip.spent_on("finish")
            skip(stage.skipped, stage.rows, fed)
            layers.append(LayerPlan(placed.rows.host, fed, publish, self._signals.ranked))
            yield len(placed.rows)
        self.executed.chunks.append(layers)
        return hidden

    def _first_stage(self, rows: Rows) -> Stage:
        layout = self._layout
        return Stage(
            layer=0,
            num_layers=len(self._adapter.layers),
            layout=layout,
            signals=self._signals,
            active=layout.stored,
            rows=rows.device,
            skipped=torch.zeros(layout.num_tokens, dtype=torch.bool, device=layout.device),
        )

    def _placed(self, chosen: Selection, start: int, stop: int) -> Placed:
        """The rows of ``chosen`` from ``start`` to ``stop``."""
        rows = Rows(chosen.host_rows, chosen.rows)
        return Placed.of(self._adapter, rows.between(rows.before(start), rows.before(stop)))

    def _feed(
        self, stage: Stage, attended: Float[Tensor, "row query_head*dim"]
    ) -> Int[Tensor, "some"] | None:
        """Positions of the rows that run the FFN; None is all."""
        self._signals.measure_output = lambda: torch.linalg.vector_norm(
            attended, dim=-1, dtype=torch.float32
        )
        return self._policy.feed(stage)

    def _deviation(
        self, index: int, layer: Layer, placed: Placed, hidden: Float[Tensor, "row hidden"]
    ) -> Float[Tensor, "token"]:
        """Squared distance of the active rows' fresh K/V from the cache; zero elsewhere."""
        self._signals.ranked = len(placed.rows)
        normed = layer.attention_input(hidden)
        fresh = placed.rotate(layer.keys(normed)), layer.values(normed)
        known = self._trip.cache.read(index, placed.rows.device)
        distance = sum(
            (new.float() - old.float()).square().sum((0, 2))
            for new, old in zip(fresh, known, strict=True)
        )
        full = torch.zeros(self._layout.num_tokens, device=hidden.device)
        return full.index_copy_(0, placed.rows.device, torch.as_tensor(distance))


def _join(parts: tuple[LayerPlan, ...]) -> LayerPlan:
    """One layer of a plan out of its chunks, on the host."""
    publish = [part.publish.cpu() for part in parts if part.publish is not None]
    ffn = [part.ffn.cpu() for part in parts if part.ffn is not None]
    active = [part.active for part in parts]
    return LayerPlan(
        active[0] if len(parts) == 1 else torch.cat(active),
        torch.cat(ffn) if ffn else None,
        torch.cat(publish, 1) if publish else None,
        sum(part.ranked for part in parts),
    )


def _unset() -> Tensor:
    raise ValueError("this signal is not measured at this point")
