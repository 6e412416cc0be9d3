"""Rotary embedding of states at given angles (Su et al. 2021, RoFormer, half-split layout)."""

import torch
from jaxtyping import Float
from torch import Tensor


def rotate(
    states: Float[Tensor, "*batch row dim"],
    cosine: Float[Tensor, "row half"],
    sine: Float[Tensor, "row half"],
) -> Float[Tensor, "*batch row dim"]:
    """Rotate ``states`` from angle zero to the given angles; one rounding to their dtype.

    With ``half`` below ``dim / 2`` only the first ``2 * half`` dimensions turn (partial rotary).
    Keys are stored un-rotated, so this one call is all of relocation.
    """
    half = cosine.shape[-1]
    if states.shape[-1] < 2 * half:
        raise ValueError(f"dim {states.shape[-1]} is below twice the {half} angles")
    first, second = states[..., :half], states[..., half : 2 * half]
    turned = (first * cosine - second * sine, second * cosine + first * sine)
    return torch.cat((*turned, states[..., 2 * half :].to(cosine.dtype)), -1).to(states.dtype)
