"""Merge of partial attention by log-sum-exp (Milakov and Gimelshein 2018; Ye et al. 2024)."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor


def merge(
    outs: Sequence[Float[Tensor, "*row dim"]], lses: Sequence[Float[Tensor, "*row"]]
) -> tuple[Float[Tensor, "*row dim"], Float[Tensor, "*row"]]:
    """Attention over the union of disjoint key sets, from that over each of them.

    Log-sum-exps in natural log; minus infinity is a part without keys, whose output is ignored.
    Sums in float32; the output has the dtype of the parts. Without any key: zero, minus infinity.
    """
    if len(outs) != len(lses) or not outs:
        raise ValueError(f"{len(outs)} outputs with {len(lses)} log-sum-exps")
    stacked = torch.stack([lse.float() for lse in lses])
    total = stacked.logsumexp(0)
    shares = (stacked - total.masked_fill(total == float("-inf"), 0)).exp()
    parts = (
        (share[..., None] * out.float()).masked_fill((share == 0)[..., None], 0)
        for share, out in zip(shares, outs, strict=True)
    )
    return torch.stack(list(parts)).sum(0).to(outs[0].dtype), total
