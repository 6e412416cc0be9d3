"""Dense and prefix: everything computed, and everything after the longest exact prefix."""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Int
from torch import Tensor

from redknot.recovery.policy import Policy, Stage


@dataclass(frozen=True, kw_only=True)
class Dense(Policy):
    """The unmodified model."""

    name: ClassVar = "dense"
    takes_exact: ClassVar = False
    takes_segments: ClassVar = False

    def keep(self, stage: Stage) -> Int[Tensor, "kept"]:
        """All tokens."""
        return stage.active


@dataclass(frozen=True, kw_only=True)
class Prefix(Dense):
    """Everything after the longest common prefix with an earlier prompt."""

    name: ClassVar = "prefix"
    takes_exact: ClassVar = True
