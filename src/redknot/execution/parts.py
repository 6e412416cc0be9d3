"""The static parts of a layer: what lies between attention, compiled on a GPU.

One compilation serves all layers of a model and all numbers of rows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import NamedTuple, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from redknot.kernels.relocate import rotate
from redknot.models import Layer

T = TypeVar("T")
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
        """Each compiled once for any number of rows, and once more for a single row."""
        return cls(
            _compiled(project, backend),
            _compiled(project_tail, backend),
            _compiled(add_attention, backend),
            _compiled(add_both, backend),
            _compiled(ffn, backend),
        )


def _compiled(function: Callable[..., T], backend: str) -> Callable[..., T]:
    # A copy: PyTorch keeps few versions of one function and runs further ones as they are.
    own = FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
    fast = torch.compile(own, backend=backend)

    def run(layer: Layer, *states: Tensor) -> T:
        for state in states:
            if len(state) > 1:  # the number of rows varies, and nothing else
                torch._dynamo.maybe_mark_dynamic(state, 0)
        return fast(layer, *states)

    return run


EAGER = Parts()
