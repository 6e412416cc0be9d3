"""The static parts of a layer: what lies between attention, compiled on a GPU.

One compilation serves all layers of a model and all numbers of rows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from redknot.kernels.relocate import rotate
from redknot.models import Layer

Hidden = Float[Tensor, "row hidden"]


class Projected(NamedTuple):
    """What a layer projects its rows to."""

    query: Float[Tensor, "query_head row dim"]
    "Rotated."
    key: Float[Tensor, "kv_head row dim"]
    "Un-rotated."
    value: Float[Tensor, "kv_head row dim"]


def project(layer: Layer, hidden: Hidden, cosine: Tensor, sine: Tensor) -> Projected:
    """Queries, keys and values of all rows."""
    normed = layer.attention_input(hidden)
    query = rotate(layer.queries(normed), cosine, sine)
    return Projected(query, layer.keys(normed), layer.values(normed))


def project_tail(layer: Layer, hidden: Hidden, cosine: Tensor, sine: Tensor) -> Projected:
    """Keys and values of all rows; queries of the last ones, as many as there are angles."""
    normed = layer.attention_input(hidden)
    query = rotate(layer.queries(normed[-cosine.shape[0] :]), cosine, sine)
    return Projected(query, layer.keys(normed), layer.values(normed))


def add_attention(layer: Layer, hidden: Hidden, attended: Float[Tensor, "row width"]) -> Hidden:
    """The residual stream behind attention."""
    return hidden + layer.attention_output(attended)


def add_both(layer: Layer, hidden: Hidden, attended: Float[Tensor, "row width"]) -> Hidden:
    """The residual stream behind attention and FFN."""
    hidden = hidden + layer.attention_output(attended)
    return hidden + layer.ffn(hidden)


def ffn(layer: Layer, hidden: Hidden) -> Hidden:
    """What the FFN adds."""
    return layer.ffn(hidden)


@dataclass(frozen=True, slots=True)
class Parts:
    """The functions above, as they are or compiled."""

    project: Callable[..., Projected] = project
    project_tail: Callable[..., Projected] = project_tail
    add_attention: Callable[..., Hidden] = add_attention
    add_both: Callable[..., Hidden] = add_both
    ffn: Callable[..., Hidden] = ffn

    @classmethod
    def compiled(cls, backend: str = "inductor") -> "Parts":
        """For a number of rows that is not known yet; a single row gets a version of its own."""

        compiled = partial(torch.compile, dynamic=True, backend=backend)
        return cls(
            compiled(project),
            compiled(project_tail),
            compiled(add_attention),
            compiled(add_both),
            compiled(ffn),
        )


EAGER = Parts()
