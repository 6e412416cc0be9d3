"""Attention in float64 over explicit sets of keys, and how far rounding may lead away from it."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from tests.kernels.inputs import DEVICE, Pages, Request, shown
from torch import Tensor

EPS = torch.finfo(torch.float32).eps
EXP = 2 * EPS
"Relative error of an exponential in float32."
FAST_EXP = 2.0**-13
"That of PyTorch's CPU kernels for half inputs: a polynomial with an error of 1.07e-4."


class Truth(NamedTuple):
    """What is right, and by how much each number may differ."""

    out: Tensor  # [row, query_head * dim], float64
    lse: Tensor  # [query_head, row]
    out_bound: Tensor
    lse_bound: Tensor

    def check(self, out: Tensor, lse: Tensor | None = None) -> None:
        """Compare outputs of a kernel, shape and all."""
        _within(out, self.out, self.out_bound)
        if lse is not None:
            assert lse.dtype is torch.float32
            blind = self.lse.isneginf()
            assert torch.equal(lse.cpu().isneginf(), blind)
            _within(lse.cpu()[~blind], self.lse[~blind], self.lse_bound[~blind])


def _within(got: Tensor, truth: Tensor, bound: Tensor) -> None:
    assert got.shape == truth.shape
    wrong = ~((got.cpu().double() - truth).abs() <= bound)  # NaN is wrong
    assert not bool(wrong.any()), f"{int(wrong.sum())} of {wrong.numel()}, {wrong.nonzero()[:4]}"


def truth(
    query: Tensor,
    pages: Pages,
    requests: Sequence[Request],
    scale: float,
    *,
    merges: int = 8,
    exponential: float = EXP,
) -> Truth:
    """Softmax over the keys of `shown`, row by row of the requests."""
    found, first = [], 0
    group = query.shape[0] // len(pages.keys[0])
    states = query.cpu().double()
    for request, keys, values in zip(requests, pages.keys, pages.values, strict=True):
        own = states[:, first : first + len(request.positions)]
        first += len(request.positions)
        heads = [
            _head(own[head * group : (head + 1) * group], keys[head], values[head], request, head)
            for head in range(len(keys))
        ]
        found.append([torch.cat(parts) for parts in zip(*heads, strict=True)])
    size, count, lse, out, mean, largest = (torch.cat(x, 1) for x in zip(*found, strict=True))
    out_bound, lse_bound = bounds(
        query.dtype, query.shape[2], size * scale, count, lse, mean, largest,
        merges=merges, exponential=exponential,
    )  # fmt: skip
    return Truth(_by_row(out), lse, _by_row(out_bound), lse_bound)


def _by_row(x: Tensor) -> Tensor:
    return x.transpose(0, 1).flatten(1)


def _head(
    query: Tensor, key: Tensor, value: Tensor, request: Request, kv_head: int
) -> tuple[Tensor, ...]:
    """Largest sum |q||k|, number of keys, log-sum-exp; then output, mean and largest |v|."""
    if not len(key):
        nothing = query.new_zeros(query.shape[:2])
        return nothing, nothing, nothing.log(), query, query, query  # no rows
    mask = torch.zeros(query.shape[1], len(key), dtype=torch.bool)
    for row, position in enumerate(request.positions):
        mask[row, sorted(shown(position, request.reaches[kv_head]))] = True
    scores = (query * query.shape[2] ** -0.5) @ key.T
    lse = scores.masked_fill(~mask, float("-inf")).logsumexp(-1)
    weights = torch.where(mask, (scores - torch.where(lse.isinf(), 0, lse)[..., None]).exp(), 0)
    size = torch.where(mask, query.abs() @ key.abs().T, 0).amax(-1)
    count = mask.sum(-1).expand(lse.shape)
    largest = (mask[..., None] * value.abs()).amax(1).expand_as(query)
    return size, count, lse, weights @ value, weights @ value.abs(), largest


def bounds(
    dtype: torch.dtype,
    dim: int,
    size: Tensor,
    count: Tensor,
    lse: Tensor,
    mean: Tensor,
    largest: Tensor,
    *,
    merges: int,
    exponential: float,
) -> tuple[Tensor, Tensor]:
    """Rounding of attention in float32 on inputs of ``dtype``; EPS is float32's, u = eps / 2.

    A score is a sum of ``dim`` products whose magnitudes add up to ``size``: accumulation errs by
    EPS * dim * size (one whole EPS per step, for tensor cores truncate); the scale, its product
    with log2(e) and the shift by the maximum are 4 roundings of numbers up to ``size``; then comes
    the error of the ``exponential``. Weights so err by ``score``, relatively, in numerator and
    denominator. Each adds up ``count`` terms and is scaled once a step: 2 EPS a term. Each of
    ``merges`` partial results comes with a log-sum-exp that has been rounded, so its share errs by
    EPS * |lse| and a few roundings more. All this is relative to ``mean``, the mean |value|.

    In a half precision the weights (at most 1) are rounded before the product, by u, or half of the
    smallest subnormal each, relative to a denominator of at least 1; the output of each part and
    of the whole by u.
    """
    kind, size, counts = torch.finfo(dtype), size.clamp(min=1), count[..., None]
    score = EPS * (dim + 4) * size + exponential
    log = lse.abs().nan_to_num(posinf=0)
    lse_bound = score + EPS * (2 * count + 2 * log + merges + 4)
    relative = 2 * score + EPS * (4 * count + 4 * log + 4 * merges + 8)
    half = 3 * kind.eps / 2 if dtype != torch.float32 else 0.0
    if dtype == torch.bfloat16 and DEVICE.type == "cpu":
        half *= 2  # Triton's interpreter cuts off what does not fit instead of rounding it
    smallest = kind.tiny * kind.eps
    out_bound = (relative[..., None] + half) * mean + smallest * (counts * largest + 1)
    return torch.where(counts == 0, 0, out_bound), lse_bound
