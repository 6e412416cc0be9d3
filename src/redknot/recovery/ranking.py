"""Ranking of tokens: the highest scores, in order of position."""

from jaxtyping import Float, Int
from torch import Tensor

from redknot.kernels.select import select_top


def top_share(
    scores: Float[Tensor, "token"], among: Int[Tensor, "some"], share: float
) -> Int[Tensor, "kept"]:
    """The ``share`` of positions ``among`` with the highest scores; at least one if share > 0."""
    return top_count(scores, among, max(1, int(share * len(among))) if share else 0)


def top_count(
    scores: Float[Tensor, "token"], among: Int[Tensor, "some"], count: int
) -> Int[Tensor, "kept"]:
    """The ``count`` positions ``among`` with the highest scores, sorted by position.

    Equal scores go to the earlier token, so that a plan does not depend on the sort's mood.
    """
    if count >= len(among):
        return among
    return among[select_top(scores[among], count)]
