"""EPIC: the first tokens of each segment are computed again."""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Int
from torch import Tensor

from redknot.recovery.policy import Policy, Stage, count


@dataclass(frozen=True, kw_only=True)
class Epic(Policy):
    """LegoLink of EPIC (Hu et al. 2024): the first ``k`` tokens of each segment."""

    k: int = 64
    "Tokens of each segment."

    name: ClassVar = "epic"

    def check(self) -> None:
        """Whole numbers from 0."""
        count(self.k, "k")

    def keep(self, stage: Stage) -> Int[Tensor, "kept"]:
        """The heads of the segments."""
        if stage.layer:
            return stage.active
        mask = stage.layout.reusable.clone()
        for start, stop in stage.layout.segments:
            mask[min(start + self.k, stop) : stop] = False
        return mask.nonzero().flatten()
