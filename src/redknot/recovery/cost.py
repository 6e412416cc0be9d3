"""Predicted seconds of a plan: counted operations over rates that a short calibration measured."""

from dataclasses import dataclass

from redknot.recovery.flops import Flops
from redknot.recovery.plan import Plan


@dataclass(frozen=True, slots=True)
class Rates:
    """What one device does with one model."""

    matmul: float
    "FLOP/s of projections and FFN over gathered rows."
    causal: float
    "FLOP/s of attention where all rows run, in visible pairs."
    gathered: float
    "FLOP/s of attention over gathered rows, in visible pairs."
    relocate: float
    "FLOP/s of relocation, its copies included."
    layer_overhead: float
    "Seconds that a layer takes however few its rows are."

    def seconds(self, flops: Flops, plan: Plan) -> float:
        """Time of ``plan``, whose operations are ``flops``."""
        whole = all(len(layer.active) == plan.num_tokens for layer in plan.layers)
        passes = 2 if plan.probe_rows else 1
        return (
            (flops.projection + flops.ffn) / self.matmul
            + flops.attention / (self.causal if whole else self.gathered)
            + flops.relocation / self.relocate
            + passes * len(plan.layers) * self.layer_overhead
        )
