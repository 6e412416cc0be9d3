"""From a policy to the rows of each layer: shared by the executor and by simulation."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from redknot.recovery.flops import question_rows
from redknot.recovery.layout import Layout
from redknot.recovery.plan import LayerPlan, Plan
from redknot.recovery.policy import Policy, Stage
from redknot.recovery.signals import Signals


class Selection(NamedTuple):
    """What flows from some layer on."""

    active: Int[Tensor, "token"]
    "Stored tokens, sorted."
    rows: Int[Tensor, "row"]
    "All of them: the stored tokens that are left and those that always flow, sorted."
    host_rows: Int[Tensor, "row"]


def select(policy: Policy, stage: Stage) -> Selection | None:
    """What ``policy`` keeps at ``stage``; None where nothing changes.

    The host waits for the device once, for the rows that it plans attention with. ValueError if the
    policy brings tokens back.
    """
    if not len(stage.active):
        return None
    kept = policy.keep(stage)
    if kept is stage.active:
        return None
    kept = kept.sort().values
    tokens = stage.layout.num_tokens
    active = torch.zeros(tokens, dtype=torch.bool, device=kept.device)
    active.index_fill_(0, stage.active, True)
    inside = (kept >= 0) & (kept < tokens)
    sound = (active[kept.clamp(0, tokens - 1)] & inside).all() & (kept.diff() > 0).all()
    rows = torch.cat([kept, stage.layout.fresh]).sort().values
    host = torch.cat([rows, sound[None].to(rows.dtype)]).cpu()
    if not host[-1]:
        raise ValueError(
            f"{policy.describe()} keeps tokens that are not active at layer {stage.layer}"
        )
    return Selection(kept, rows, host[:-1])


def skip(
    skipped: Bool[Tensor, "token"], rows: Int[Tensor, "row"], fed: Int[Tensor, "some"] | None
) -> None:
    """Mark in ``skipped`` the rows that are not ``fed`` to the FFN of a layer."""
    if fed is not None:
        missed = torch.zeros_like(skipped).index_fill_(0, rows, True).index_fill_(0, fed, False)
        skipped |= missed


@dataclass(frozen=True, slots=True, eq=False)
class Guess:
    """Signals that nobody has measured: for predicting what a plan will cost.

    The same noise for all layers and groups, which costs nothing however long the prompt is.
    """

    groups: Bool[Tensor, "layer group"]
    num_tokens: int

    def probe_mass(self) -> Float[Tensor, "layer group token"]:
        """Uniform noise."""
        return self._noise().expand(*self.groups.shape, -1)

    def global_groups(self) -> Bool[Tensor, "layer group"]:
        """Known, not guessed."""
        return self.groups

    def deviation(self) -> Float[Tensor, "token"]:
        """Uniform noise."""
        return self._noise()

    def output_norm(self) -> Float[Tensor, "row"]:
        """Uniform noise."""
        return self._noise()

    def _noise(self) -> Float[Tensor, "token"]:
        return torch.rand(self.num_tokens, generator=torch.Generator().manual_seed(0))


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
        rows=torch.arange(layout.exact, layout.num_tokens),
        skipped=torch.zeros(layout.num_tokens, dtype=torch.bool),
    )
    layers = []
    for layer in range(num_layers):
        stage = replace(stage, layer=layer)
        ranked = len(stage.rows) if policy.ranks_by_deviation(layer) else 0
        chosen = select(policy, stage)
        if chosen is not None:
            stage = replace(stage, active=chosen.active, rows=chosen.rows)
        publish, fed = policy.publish(stage), policy.feed(stage)
        skip(stage.skipped, stage.rows, fed)
        layers.append(LayerPlan(stage.rows, fed, publish, ranked))
    probe = len(question_rows(layout)) if policy.uses_probe and len(layout.stored) else 0
    return Plan(policy.describe(), layout.num_tokens, tuple(layers), probe)
