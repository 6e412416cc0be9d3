"""What a policy may look at while it plans."""

from typing import Protocol

from jaxtyping import Bool, Float
from torch import Tensor


class Signals(Protocol):
    """Measurements of one request, on the device of the model."""

    def probe_mass(self) -> Float[Tensor, "layer group token"]:
        """Mean attention probability of the probe on every token (question pass)."""

    def global_groups(self) -> Bool[Tensor, "layer group"]:
        """Groups that the head map lets see everything; all without a map."""

    def deviation(self) -> Float[Tensor, "token"]:
        """Squared distance of fresh K and V from the reused ones in the layer being planned.

        Only for tokens that are still active; others are zero. Costs their K/V projections.
        """

    def output_norm(self) -> Float[Tensor, "row"]:
        """Norm of the attention output of the rows of the layer being planned."""
