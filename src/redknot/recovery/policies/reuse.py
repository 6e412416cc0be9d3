"""Plain reuse: nothing of the stored segments is computed again."""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Int
from torch import Tensor

from redknot.recovery.policy import Policy, Stage


@dataclass(frozen=True, kw_only=True)
class Reuse(Policy):
    """Only tokens outside stored segments flow (PromptCache, Gim et al. 2023)."""

    name: ClassVar = "reuse"

    def keep(self, stage: Stage) -> Int[Tensor, "kept"]:
        """None."""
        return stage.active[:0]
