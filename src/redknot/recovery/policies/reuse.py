"""Plain reuse: nothing of the stored segments is computed again."""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Int
from torch import Tensor

from redknot.recovery.layout import Layout
from redknot.recovery.policy import Policy
from redknot.recovery.signals import Signals


@dataclass(frozen=True, kw_only=True)
class Reuse(Policy):
    """Only tokens outside stored segments flow (PromptCache, Gim et al. 2023)."""

    name: ClassVar = "reuse"

    def keep(
        self,
        layer: int,
        num_layers: int,
        active: Int[Tensor, "token"],
        layout: Layout,
        signals: Signals,
    ) -> Int[Tensor, "kept"]:
        """None."""
        return active[:0]
