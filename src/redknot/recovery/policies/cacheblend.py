"""CacheBlend: the tokens whose K/V deviate most at a check layer."""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Int
from torch import Tensor

from redknot.recovery.policy import Policy, Stage, count, fraction
from redknot.recovery.ranking import top_share


@dataclass(frozen=True, kw_only=True)
class CacheBlend(Policy):
    """Yao et al. 2024: all tokens up to the check layer, then the share that deviates most."""

    share: float = 0.2
    "Of the stored tokens."
    check_layer: int = 1

    name: ClassVar = "cacheblend"
    adaptive: ClassVar = True

    def check(self) -> None:
        """Share in [0, 1], a layer from 1."""
        fraction(self.share, "share")
        count(self.check_layer, "check_layer", least=1)

    def ranks_by_deviation(self, layer: int) -> bool:
        """At the check layer."""
        return layer == self.check_layer

    def keep(self, stage: Stage) -> Int[Tensor, "kept"]:
        """All, then those chosen at the check layer."""
        if stage.layer != self.check_layer:
            return stage.active
        return top_share(stage.signals.deviation(), stage.active, self.share)
