"""EPIC: the first tokens of each segment are computed again."""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Int
from torch import Tensor

from redknot.recovery.layout import Layout
from redknot.recovery.policy import Policy, count
from redknot.recovery.signals import Signals


@dataclass(frozen=True, kw_only=True)
class Epic(Policy):
    """LegoLink of EPIC (Hu et al. 2024): the first ``k`` tokens of each segment."""

    k: int = 64
    "Tokens of each segment."

    name: ClassVar = "epic"

    def check(self) -> None:
        """Whole numbers from 0."""
        count(self.k, "k")

    def keep(
        self,
        layer: int,
        num_layers: int,
        active: Int[Tensor, "token"],
        layout: Layout,
        signals: Signals,
    ) -> Int[Tensor, "kept"]:
        """The heads of the segments."""
        if layer:
            return active
        mask = layout.reusable.clone()
        for start, stop in layout.segments:
            mask[min(start + self.k, stop) : stop] = False
        return mask.nonzero().flatten()
