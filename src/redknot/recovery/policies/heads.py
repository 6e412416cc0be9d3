"""Policies that compute every token and save by head class: duo and the paper's recipe."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from redknot.recovery.policies.dense import Dense
from redknot.recovery.policy import Stage, Windows, count, fraction
from redknot.recovery.ranking import top_share


@dataclass(frozen=True, kw_only=True)
class Duo(Dense):
    """All tokens, each head under the head map (DuoAttention, Xiao et al. 2024; StreamingLLM)."""

    windows: Windows = Windows.ALL

    name: ClassVar = "duo"
    needs_head_map: ClassVar = True


@dataclass(frozen=True, kw_only=True)
class RedKnot(Dense):
    """The paper's recipe: local heads keep reused K/V, deep FFNs run on important tokens only."""

    dense_until: int = 5
    "Layers, from the first, whose FFN runs on all tokens."
    mass: float = 0.6
    "Deep FFNs run on the fewest tokens that carry this share of the importance; 0 uses `share`."
    share: float = 0.2
    "Of the rows, where `mass` is 0."
    recent: int = 128
    "Last context rows that always run the FFN."
    signal: Literal["output", "question"] = "output"
    "Importance: norm of the attention output, or attention from the probe."
    publish_all: bool = False
    "Fresh K/V in local heads too."
    guard: bool = False
    "A token that skipped an FFN publishes nothing from then on."
    windows: Windows = Windows.CONTEXT

    name: ClassVar = "redknot"
    takes_exact: ClassVar = True
    takes_segments: ClassVar = True
    adaptive: ClassVar = True
    needs_head_map: ClassVar = True

    @property
    def uses_probe(self) -> bool:  # type: ignore[override]
        """Only with the question signal."""
        return self.signal == "question"

    def check(self) -> None:
        """Shares in [0, 1], counts from 0, a known signal."""
        fraction(self.mass, "mass")
        fraction(self.share, "share")
        if self.signal not in ("output", "question"):
            raise ValueError(f"signal must be output or question, not {self.signal!r}")
        count(self.dense_until, "dense_until")
        count(self.recent, "recent")

    def feed(self, stage: Stage) -> Int[Tensor, "some"] | None:
        """Context rows that carry the importance, the recent ones and all that is not stored."""
        if stage.layer < self.dense_until or not len(stage.active):
            return None
        among = torch.searchsorted(stage.rows, stage.active)
        if self.signal == "question":
            importance = stage.signals.probe_mass()[stage.layer :].sum((0, 1))[stage.rows]
        else:
            importance = stage.signals.output_norm()
        keep = ~stage.layout.reusable[stage.rows]
        if self.mass:
            keep[among] = _carrying(importance[among], self.mass)
        else:
            keep.index_fill_(0, top_share(importance, among, self.share), True)
        keep.index_fill_(0, among[len(among) - min(self.recent, len(among)) :], True)
        return stage.rows[keep]

    def publish(self, stage: Stage) -> Bool[Tensor, "group row"] | None:
        """Global heads, and every head for tokens without stored state."""
        allowed = stage.signals.global_groups()[stage.layer][:, None] | self.publish_all
        if self.guard:
            allowed = allowed & ~stage.skipped[stage.rows]
        return allowed | ~stage.layout.reusable[stage.rows]


def _carrying(importance: Float[Tensor, "some"], mass: float) -> Bool[Tensor, "some"]:
    """The fewest rows whose importance adds up to ``mass`` of the whole, the first ones of equals.

    How many they are stays on the device.
    """
    ordered, order = importance.clamp(min=0).sort(descending=True, stable=True)
    reached = ordered.cumsum(0) / ordered.sum().clamp(min=1e-30)
    rank = torch.arange(len(order), device=order.device)
    needed = rank <= (reached < mass).sum()
    return torch.zeros_like(needed).scatter(0, order, needed)
