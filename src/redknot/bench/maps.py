"""Head maps of random scores: the cost of a share without having measured any head."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from redknot.heads import HeadMap
from redknot.models import LayerShape


@dataclass(frozen=True, kw_only=True, slots=True)
class MapSettings:
    """What local heads see, and which heads are local."""

    window: int = 256
    "Tokens that a local head sees, its own included."
    sink: int = 4
    "First tokens that it sees too."
    seed: int = 0
    "Of the random scores and token ids."

    def random_map(self, shapes: Sequence[LayerShape], share: float) -> HeadMap:
        """A map with this share of global groups in both phases; smaller shares are nested."""
        generator = torch.Generator().manual_seed(self.seed)
        scores = torch.rand(len(shapes), shapes[0].num_groups, generator=generator)
        return HeadMap.from_scores(
            scores, global_share=share, window=self.window, sink=self.sink, model="random scores"
        )
