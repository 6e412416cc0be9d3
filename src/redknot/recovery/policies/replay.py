"""Replay of a saved plan."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from redknot.recovery.layout import Layout
from redknot.recovery.plan import Plan
from redknot.recovery.policy import Policy, Stage


@dataclass(frozen=True, kw_only=True, eq=False)
class Replay(Policy):
    """Does again what ``plan`` says, on a prompt of the same length."""

    plan: Plan

    name: ClassVar = "replay"

    def view(self, layout: Layout) -> Layout:
        """What was known when the plan was made: tokens that it computed are not taken over."""
        first = int(self.plan.layers[0].active[0])
        return layout.limited(exact=min(layout.exact, first), segments=True)

    def keep(self, stage: Stage) -> Int[Tensor, "kept"]:
        """The plan's active tokens."""
        plan = self.plan
        if stage.layout.num_tokens != plan.num_tokens or stage.num_layers != len(plan.layers):
            raise ValueError("the plan is of another model or of a prompt of another length")
        planned = plan.layers[stage.layer].active.to(stage.active.device)
        return stage.active[torch.isin(stage.active, planned)]

    def feed(self, stage: Stage) -> Int[Tensor, "some"] | None:
        """The plan's FFN rows among ``rows``."""
        ffn = self.plan.layers[stage.layer].ffn
        if ffn is None:
            return None
        return stage.rows[torch.isin(stage.rows, ffn.to(stage.rows.device))]

    def publish(self, stage: Stage) -> Bool[Tensor, "group row"] | None:
        """The plan's publications among ``rows``."""
        planned = self.plan.layers[stage.layer]
        if planned.publish is None:
            return None
        device = stage.rows.device
        return planned.publish.to(device)[:, torch.isin(planned.active.to(device), stage.rows)]

    def describe(self) -> str:
        """Which policy made the plan."""
        return f"replay of {self.plan.policy}"
