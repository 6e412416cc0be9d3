"""The recovery pass: rows flow as a policy says, and the executed plan is written down."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from redknot.execution.layer import Placed, Trip, attention, finish
from redknot.models import Adapter, Layer
from redknot.recovery import LayerPlan, Layout, Plan, Policy
from redknot.recovery.flops import question_rows
from redknot.recovery.policy import Stage
from redknot.recovery.selection import select, with_fresh


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
        self._adapter, self._policy, self._layout = adapter, policy, layout
        self._trip = trip
        self._token_ids = token_ids.to(adapter.device)
        self._signals = RequestSignals(mass, global_groups)
        self._chunks: list[list[LayerPlan]] = []

    def run(self, start: int, stop: int) -> Float[Tensor, "row hidden"]:
        """Run the rows of positions ``start`` to ``stop`` through all layers.

        Returns the last row's output of the last layer. Chunks must come in order and end with the
        prompt; only policies that are not adaptive may run in more than one.
        """
        stage = self._first_stage(start, stop)
        placed = Placed.at(self._adapter, stage.rows)
        hidden = self._adapter.embed(self._token_ids[placed.rows.device])
        layers: list[LayerPlan] = []
        for index, layer in enumerate(self._adapter.layers):
            stage = replace(stage, layer=index)
            self._signals.ranked = 0
            self._signals.measure_deviation = partial(self._deviation, index, layer, placed, hidden)
            kept = select(self._policy, stage)
            if kept is not stage.active:
                stage = replace(stage, active=kept, rows=self._rows(kept, start, stop))
                before, placed = placed, Placed.at(self._adapter, stage.rows)
                hidden = hidden[torch.searchsorted(before.rows.device, placed.rows.device)]
            if not len(stage.rows):  # a chunk whose tokens have all left
                layers.append(LayerPlan(stage.rows))
                continue
            publish = self._policy.publish(stage)
            last = index == stage.num_layers - 1
            attended = attention(
                self._trip, index, layer, placed, hidden, publish=publish, tail=1 if last else None
            ).out
            fed = None
            if last:
                hidden = finish(layer, hidden[-1:], attended)
            else:
                fed = self._feed(stage, attended)
                hidden = finish(layer, hidden, attended, _indices(stage.rows, fed, hidden))
            if fed is not None:
                stage.skipped[stage.rows[~torch.isin(stage.rows, fed)]] = True
            layers.append(LayerPlan(stage.rows, fed, publish, self._signals.ranked))
        self._chunks.append(layers)
        self._signals.forget()
        return hidden

    def plan(self) -> Plan:
        """What was executed."""
        probe = len(question_rows(self._layout)) if self._signals._mass is not None else 0
        layers = tuple(_join(parts) for parts in zip(*self._chunks, strict=True))
        return Plan(self._policy.describe(), self._layout.num_tokens, layers, probe)

    def _first_stage(self, start: int, stop: int) -> Stage:
        layout = self._layout
        return Stage(
            layer=0,
            num_layers=len(self._adapter.layers),
            layout=layout,
            signals=self._signals,
            active=layout.stored,
            rows=self._rows(layout.stored, start, stop),
            skipped=torch.zeros(layout.num_tokens, dtype=torch.bool),
        )

    def _rows(self, active: Int[Tensor, "token"], start: int, stop: int) -> Int[Tensor, "row"]:
        rows = with_fresh(active, self._layout)
        return rows[(rows >= start) & (rows < stop)]

    def _feed(
        self, stage: Stage, attended: Float[Tensor, "row query_head*dim"]
    ) -> Int[Tensor, "some"] | None:
        """Positions of the rows that run the FFN; None is all."""
        self._signals.measure_output = lambda: attended.float().norm(dim=-1).cpu()
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
        full = torch.zeros(self._layout.num_tokens)
        full[placed.rows.host] = torch.as_tensor(distance).cpu()
        return full


def _join(parts: tuple[LayerPlan, ...]) -> LayerPlan:
    """One layer of a plan out of its chunks."""
    if len(parts) == 1:
        return parts[0]
    publish = [part.publish for part in parts if part.publish is not None]
    ffn = [part.ffn for part in parts if part.ffn is not None]
    return LayerPlan(
        torch.cat([part.active for part in parts]),
        torch.cat(ffn) if ffn else None,
        torch.cat(publish, 1) if publish else None,
    )


def _indices(
    rows: Int[Tensor, "row"], fed: Int[Tensor, "some"] | None, hidden: Tensor
) -> Int[Tensor, "some"] | None:
    """Where the ``fed`` positions stand among ``rows``, on the device of ``hidden``."""
    return None if fed is None else torch.searchsorted(rows, fed).to(hidden.device)


def _unset() -> Tensor:
    raise ValueError("this signal is not measured at this point")
