"""The adapter protocol: what the executor may ask of a model family."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from redknot.models.rotary import Rotary


class StateKind(StrEnum):
    """What a layer keeps of a token."""

    KV = "kv"  # keys and values, relocatable
    LATENT = "latent"  # MLA: one latent and a rotary key for all heads
    RECURRENT = "recurrent"  # linear attention: an operator on a fixed-size state


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Floating-point operations of one token's projections and FFN in one layer."""

    query: int
    key_value: int
    output: int
    ffn: int


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Shape of one layer's attention. A visibility group is a KV head under GQA."""

    state: StateKind
    num_groups: int
    queries_per_group: int
    head_dim: int
    scale: float
    horizon: int | None  # the model's own sliding window, in tokens
    cost: LayerCost

    @property
    def planes(self) -> dict[str, int]:
        """What is stored of a token and group, with its width."""
        return {"key": self.head_dim, "value": self.head_dim}

    @property
    def attention_pair_flops(self) -> int:
        """FLOPs of one visible (query, key) pair in all query heads of one group."""
        return 4 * self.head_dim * self.queries_per_group


class Layer(Protocol):
    """The callable parts of one decoder layer; rows are tokens, in any selection."""

    shape: LayerShape

    def attention_input(self, hidden: Float[Tensor, "row hidden"]) -> Float[Tensor, "row hidden"]:
        """Normalised input of the projections."""

    def queries(self, normed: Float[Tensor, "row hidden"]) -> Float[Tensor, "query_head row dim"]:
        """Un-rotated queries."""

    def keys(self, normed: Float[Tensor, "row hidden"]) -> Float[Tensor, "kv_head row dim"]:
        """Un-rotated keys."""

    def values(self, normed: Float[Tensor, "row hidden"]) -> Float[Tensor, "kv_head row dim"]:
        """Values."""

    def attention_output(
        self, attended: Float[Tensor, "row query_head*dim"]
    ) -> Float[Tensor, "row hidden"]:
        """What attention adds to the residual stream."""

    def ffn(self, hidden: Float[Tensor, "row hidden"]) -> Float[Tensor, "row hidden"]:
        """What the FFN, its norm included, adds to the residual stream."""


class Adapter(Protocol):
    """A loaded model seen as layers. Weights stay where Transformers put them."""

    layers: Sequence[Layer]
    rotary: Rotary
    settings: str
    "All of the config that shapes state besides weights and rotary angles."
    context_length: int
    device: torch.device
    dtype: torch.dtype

    def embed(self, token_ids: Int[Tensor, "row"]) -> Float[Tensor, "row hidden"]:
        """Input of the first layer."""

    def logits(self, hidden: Float[Tensor, "row hidden"]) -> Float[Tensor, "row vocab"]:
        """Final norm and output head, in float32."""
