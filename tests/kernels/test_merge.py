"""Merging of partial attention: against attention over the union, and with empty parts."""

import itertools

import pytest
import torch
from tests.kernels.inputs import DEVICE, DTYPES, NAN
from torch import Tensor

from redknot.kernels.merge import merge

EPS = torch.finfo(torch.float32).eps
INF = float("inf")


def attended(keys: Tensor, values: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
    """Attention in float64, stored as kernels store it."""
    scores = query @ keys.T
    out = torch.nan_to_num(scores.softmax(-1)) @ values
    return out.to(DEVICE), scores.logsumexp(-1).float().to(DEVICE)


def inputs(num_keys: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = (num_keys, 16), (num_keys, 16), (5, 16)
    return tuple(torch.randn(*s, generator=generator, dtype=torch.float64) for s in shapes)


def bound(dtype: torch.dtype, values: Tensor, lses: list[Tensor]) -> float:
    """A share errs by the rounding of its log-sum-exp and of the total, EPS * |lse| each, and by a
    few EPS; the parts and the whole are rounded to ``dtype``. Relative to the largest value."""
    known = max(float(x[x.isfinite()].abs().max()) if x.isfinite().any() else 0.0 for x in lses)
    return float(values.abs().max()) * (EPS * (4 * known + 8) + torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cuts", [[], [0], [20], [3, 3, 4], [0, 19, 20]])
def test_parts_make_attention_over_the_union(cuts: list[int], dtype: torch.dtype) -> None:
    keys, values, query = inputs(20, len(cuts))
    borders = [0, *cuts, 20]
    parts = [attended(keys[a:b], values[a:b], query) for a, b in itertools.pairwise(borders)]
    outs, lses = [out.to(dtype) for out, _ in parts], [lse for _, lse in parts]
    for out, lse in zip(outs, lses, strict=True):
        out[lse.isneginf()] = NAN  # the output of an empty part is ignored
    out, lse = merge(outs, lses)
    right, total = attended(keys, values, query)
    assert out.dtype is dtype
    assert lse.dtype is torch.float32
    assert (out.double() - right).abs().max() <= bound(dtype, values, lses)
    assert (lse - total).abs().max() <= EPS * (2 * float(total.abs().max()) + 8)


@pytest.mark.parametrize("junk", [0.0, NAN, INF])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_empty_parts_alone_give_nothing(count: int, junk: float) -> None:
    """KN-01."""
    empty = torch.full((4, 8), junk, device=DEVICE), torch.full((4,), -INF, device=DEVICE)
    out, lse = merge([empty[0]] * count, [empty[1]] * count)
    assert torch.equal(out, torch.zeros(4, 8, device=DEVICE))
    assert torch.equal(lse, empty[1])


@pytest.mark.parametrize("junk", [0.0, NAN, INF])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("first", [True, False])
def test_an_empty_part_leaves_the_other_unchanged(
    first: bool, dtype: torch.dtype, junk: float
) -> None:
    """KN-01."""
    out, lse = attended(*inputs(7, 1))
    out = out.to(dtype)
    none = torch.full_like(out, junk), torch.full_like(lse, -INF)
    parts = [none, (out, lse)] if first else [(out, lse), none]
    found = merge([part[0] for part in parts], [part[1] for part in parts])
    assert torch.equal(found[0], out)
    assert torch.equal(found[1], lse)


def test_rows_are_empty_one_by_one() -> None:
    (out, lse), (other, rest) = attended(*inputs(7, 2)), attended(*inputs(7, 3))
    out, other = out.float(), other.float()
    rest[::2], other[::2], lse[1], out[1] = -INF, NAN, -INF, NAN
    found, total = merge([out, other], [lse, rest])
    assert torch.equal(found[::2], out[::2])
    assert torch.equal(found[1], other[1])
    assert torch.equal(total[::2], lse[::2])
    assert not bool(found.isnan().any())


@pytest.mark.parametrize("shift", [0.0, 80.0, -300.0])
def test_the_order_of_merging_changes_nothing_but_rounding(shift: float) -> None:
    keys, values, query = inputs(30, 4)
    parts = [attended(keys[a : a + 10], values[a : a + 10], query) for a in (0, 10, 20)]
    parts = [(out.float(), lse + shift) for out, lse in parts]
    a, b, c = parts

    def join(*some: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return merge([out for out, _ in some], [lse for _, lse in some])

    allowed = 2 * bound(torch.float32, values, [lse for _, lse in parts])
    once = join(a, b, c)
    for found in (join(join(a, b), c), join(a, join(b, c)), join(c, a, b)):
        assert (found[0] - once[0]).abs().max() <= allowed
        assert (found[1] - once[1]).abs().max() <= EPS * (4 * float(once[1].abs().max()) + 16)


def test_unequal_or_no_parts_are_refused() -> None:
    for outs, lses in (([], []), ([torch.zeros(1, 2)], []), ([], [torch.zeros(1)])):
        with pytest.raises(ValueError, match="outputs with"):
            merge(outs, lses)
