"""Replay of a saved plan."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from redknot.recovery.layout import Layout
from redknot.recovery.plan import Plan
from redknot.recovery.policy import History, Policy
from redknot.recovery.signals import Signals


@dataclass(frozen=True, kw_only=True, eq=False)
class Replay(Policy):
    """Does again what ``plan`` says, on a prompt of the same length."""

    plan: Plan

    name: ClassVar = "replay"

    def view(self, layout: Layout) -> Layout:
        """What was known when the plan was made: tokens that it computed are not taken over."""
        first = int(self.plan.layers[0].active[0])
        return layout.limited(exact=min(layout.exact, first), segments=True)

    def keep(
        self,
        layer: int,
        num_layers: int,
        active: Int[Tensor, "token"],
        layout: Layout,
        signals: Signals,
    ) -> Int[Tensor, "kept"]:
        """The plan's active tokens."""
        if layout.num_tokens != self.plan.num_tokens or num_layers != len(self.plan.layers):
            raise ValueError("the plan is of another model or of a prompt of another length")
        return active[torch.isin(active, self.plan.layers[layer].active)]

    def feed(
        self,
        layer: int,
        num_layers: int,
        rows: Int[Tensor, "row"],
        layout: Layout,
        signals: Signals,
    ) -> Int[Tensor, "some"] | None:
        """The plan's FFN rows among ``rows``."""
        ffn = self.plan.layers[layer].ffn
        return None if ffn is None else rows[torch.isin(rows, ffn)]

    def publish(
        self, layer: int, rows: Int[Tensor, "row"], layout: Layout, history: History
    ) -> Bool[Tensor, "group row"] | None:
        """The plan's publications among ``rows``."""
        planned = self.plan.layers[layer]
        if planned.publish is None:
            return None
        return planned.publish[:, torch.isin(planned.active, rows)]

    def describe(self) -> str:
        """Which policy made the plan."""
        return f"replay of {self.plan.policy}"
