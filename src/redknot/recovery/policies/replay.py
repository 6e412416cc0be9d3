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
        return stage.active[torch.isin(stage.active, plan.layers[stage.layer].active)]

    def feed(self, stage: Stage) -> Int[Tensor, "some"] | None:
        """The plan's FFN rows among ``rows``."""
        ffn = self.plan.layers[stage.layer].ffn
        return None if ffn is None else stage.rows[torch.isin(stage.rows, ffn)]

    def publish(self, stage: Stage) -> Bool[Tensor, "group row"] | None:
        """The plan's publications among ``rows``."""
        planned = self.plan.layers[stage.layer]
        if planned.publish is None:
            return None
        return planned.publish[:, torch.isin(planned.active, stage.rows)]

    def describe(self) -> str:
        """Which policy made the plan."""
        return f"replay of {self.plan.policy}"
