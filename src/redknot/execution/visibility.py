"""What the rows of one request see: reaches of both phases, and the border between them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

from redknot.heads import HeadMap, Phase
from redknot.heads.head_map import everything
from redknot.kernels.attend import Reach
from redknot.models import LayerShape
from redknot.recovery import Windows
from redknot.segpaged import Retention


@dataclass(frozen=True, slots=True)
class Visibility:
    """Reach of every group by layer, for rows before and from ``border``."""

    prefill: tuple[tuple[Reach, ...], ...]
    decode: tuple[tuple[Reach, ...], ...]
    border: int

    @classmethod
    def of(
        cls,
        shapes: Sequence[LayerShape],
        border: int,
        head_map: HeadMap | None = None,
        windows: Windows = Windows.NONE,
    ) -> "Visibility":
        """As ``windows`` says; everything where there is no head map."""
        whole = tuple(everything(shape) for shape in shapes)

        def phase(which: Phase, on: bool) -> tuple[tuple[Reach, ...], ...]:
            if head_map is None or not on:
                return whole
            return tuple(
                head_map.reaches(which, layer, shape.horizon) for layer, shape in enumerate(shapes)
            )

        return cls(
            phase(Phase.PREFILL, windows.on_context), phase(Phase.DECODE, windows.on_decode), border
        )

    @property
    def hides(self) -> bool:
        """Whether some row ever misses a token before it."""
        layers = (*self.prefill, *self.decode)
        return any(reach.span is not None for layer in layers for reach in layer)

    def retention(self) -> Retention:
        """Which pages rows still to come may see, for the rows (layer, group) of a page table."""
        prefill, decode = (
            [reach for layer in layers for reach in layer] for layers in (self.prefill, self.decode)
        )
        return Retention.phased(prefill, decode, self.border)


def global_groups(
    shapes: Sequence[LayerShape], head_map: HeadMap | None
) -> Bool[Tensor, "layer group"]:
    """Groups that the head map lets see everything; all without a map."""
    if head_map is None:
        return torch.ones(len(shapes), shapes[0].num_groups, dtype=torch.bool)
    rules = head_map.rules(Phase.PREFILL)
    return torch.tensor([[rule.window is None for rule in layer] for layer in rules])
