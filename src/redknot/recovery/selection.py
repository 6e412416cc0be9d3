"""From a policy to the rows of each layer: shared by the executor and by simulation."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from redknot.recovery.flops import question_rows
from redknot.recovery.layout import Layout
from redknot.recovery.plan import LayerPlan, Plan
from redknot.recovery.policy import Policy, Stage
from redknot.recovery.signals import Signals


def select(policy: Policy, stage: Stage) -> Int[Tensor, "kept"]:
    """What ``policy`` keeps of the active stored tokens; ValueError if it brings some back."""
    if not len(stage.active):
        return stage.active
    kept = policy.keep(stage)
    if kept is stage.active:
        return kept
    kept = kept.sort().values
    if not bool(torch.isin(kept, stage.active).all()) or bool((kept.diff() == 0).any()):
        raise ValueError(
            f"{policy.describe()} keeps tokens that are not active at layer {stage.layer}"
        )
    return kept


def with_fresh(stored: Int[Tensor, "token"], layout: Layout) -> Int[Tensor, "row"]:
    """All active rows: the stored ones that are left and those that always flow."""
    return torch.cat([stored, layout.fresh]).sort().values


@dataclass(frozen=True, slots=True, eq=False)
class Guess:
    """Signals that nobody has measured: for predicting what a plan will cost."""

    groups: Bool[Tensor, "layer group"]
    num_tokens: int

    def probe_mass(self) -> Float[Tensor, "layer group token"]:
        """Uniform noise."""
        return self._noise(*self.groups.shape, self.num_tokens)

    def global_groups(self) -> Bool[Tensor, "layer group"]:
        """Known, not guessed."""
        return self.groups

    def deviation(self) -> Float[Tensor, "token"]:
        """Uniform noise."""
        return self._noise(self.num_tokens)

    def output_norm(self) -> Float[Tensor, "row"]:
        """Uniform noise."""
        return self._noise(self.num_tokens)

    def _noise(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=torch.Generator().manual_seed(0))


def simulate(
    policy: Policy,
    layout: Layout,
    num_layers: int,
    global_groups: Bool[Tensor, "layer group"],
    signals: Signals | None = None,
) -> Plan:
    """The plan that ``policy`` would execute; with guessed signals only its row counts mean
    something."""
    signals = signals or Guess(global_groups, layout.num_tokens)
    stage = Stage(
        layer=0,
        num_layers=num_layers,
        layout=layout,
        signals=signals,
        active=layout.stored,
        rows=with_fresh(layout.stored, layout),
        skipped=torch.zeros(layout.num_tokens, dtype=torch.bool),
    )
    layers = []
    for layer in range(num_layers):
        stage = replace(stage, layer=layer)
        ranked = len(stage.rows) if policy.ranks_by_deviation(layer) else 0
        kept = select(policy, stage)
        if kept is not stage.active:
            stage = replace(stage, active=kept, rows=with_fresh(kept, layout))
        publish, fed = policy.publish(stage), policy.feed(stage)
        if fed is not None:
            stage.skipped[stage.rows[~torch.isin(stage.rows, fed)]] = True
        layers.append(LayerPlan(stage.rows, fed, publish, ranked))
    probe = len(question_rows(layout)) if policy.uses_probe and len(layout.stored) else 0
    return Plan(policy.describe(), layout.num_tokens, tuple(layers), probe)
