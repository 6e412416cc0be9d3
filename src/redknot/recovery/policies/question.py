"""Policies that rank tokens by the attention they get from the question."""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Int
from torch import Tensor

from redknot.recovery.policy import Policy, Stage, fraction
from redknot.recovery.ranking import top_count, top_share


@dataclass(frozen=True, kw_only=True)
class Question(Policy):
    """One set for all layers: the share that the probe attends to most (as ProphetKV)."""

    share: float = 0.2
    "Of the stored tokens."

    name: ClassVar = "question"
    uses_probe: ClassVar = True

    def check(self) -> None:
        """Share in [0, 1]."""
        fraction(self.share, "share")

    def keep(self, stage: Stage) -> Int[Tensor, "kept"]:
        """By attention summed over all layers."""
        if stage.layer:
            return stage.active
        return top_share(stage.signals.probe_mass().sum((0, 1)), stage.active, self.share)


@dataclass(frozen=True, kw_only=True)
class QuestionDrop(Policy):
    """A shrinking set: ``first`` of the stored tokens, from depth ``until`` on only ``then``.

    Layer l ranks by the attention in layers >= l, since that is where its state will be read. A
    token that leaves keeps its reused K/V from there on. The defaults spend 0.30 of dense's FLOPs
    on prompts of 5K tokens of the embedded model.
    """

    first: float = 0.34
    then: float = 0.17
    until: float = 1 / 3
    "Share of the depth."

    name: ClassVar = "question_drop"
    uses_probe: ClassVar = True

    def check(self) -> None:
        """Shares in [0, 1], not growing."""
        for name in ("first", "then", "until"):
            fraction(getattr(self, name), name)
        if self.then > self.first:
            raise ValueError(f"then={self.then} is above first={self.first}: the set only shrinks")

    def keep(self, stage: Stage) -> Int[Tensor, "kept"]:
        """By attention in this and all later layers, at the first layer of each stage."""
        switch = round(self.until * stage.num_layers)
        if stage.layer not in (0, switch):
            return stage.active
        share = self.first if stage.layer < switch else self.then
        mass = stage.signals.probe_mass()[stage.layer :].sum((0, 1))
        return top_count(mass, stage.active, int(share * len(stage.layout.stored)))


@dataclass(frozen=True, kw_only=True)
class LayerDrop(QuestionDrop):
    """All tokens in the first third of the depth, then the share that the probe attends to."""

    first: float = 1.0
    then: float = 0.3

    name: ClassVar = "layer_drop"
