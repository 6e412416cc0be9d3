"""Rotation: against float64, composition, partial rotary and norms."""

import pytest
import torch
from torch import Tensor

from redknot.kernels.relocate import rotate

EPS = torch.finfo(torch.float32).eps
LONGEST = 8192


def angles(positions: Tensor, half: int) -> Tensor:
    """Rotary angles in float64."""
    frequencies = 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    return positions[:, None].double() * frequencies


def table(positions: Tensor, half: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    turn = angles(positions, half)
    return turn.cos().to(dtype), turn.sin().to(dtype)


def states(rows: int, dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(dim)
    return torch.randn(3, rows, dim, generator=generator, dtype=torch.float64).to(dtype)


def positions(count: int, seed: int) -> Tensor:
    return torch.randint(0, LONGEST // 2, (count,), generator=torch.Generator().manual_seed(seed))


def size(x: Tensor, half: int) -> Tensor:
    """|a| + |b| of every rotated pair, in the place of both: no component ever exceeds it."""
    pair = x[..., :half].double().abs() + x[..., half : 2 * half].double().abs()
    return torch.cat([pair, pair, torch.zeros_like(x[..., 2 * half :], dtype=torch.float64)], -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("dim", "half"), [(16, 8), (64, 32), (128, 64), (64, 8)])
def test_rotation_agrees_with_float64(dim: int, half: int, dtype: torch.dtype) -> None:
    x = states(50, dim, dtype)
    cosine, sine = table(positions(50, 1), half, torch.float32)
    got = rotate(x, cosine, sine)
    turned = torch.complex(x[..., :half].double(), x[..., half : 2 * half].double())
    turned = turned * torch.complex(cosine.double(), sine.double())
    truth = torch.cat([turned.real, turned.imag, x[..., 2 * half :].double()], -1)
    # a c - b s in float32: three roundings of at most eps / 2 each on parts below |a| + |b|; then
    # one rounding to the type of the states, whose subnormals are `tiny * eps` apart.
    kind = torch.finfo(dtype)
    once = 0.0 if dtype is torch.float32 else kind.eps
    bound = 1.5 * EPS * size(x, half) + once * truth.abs() + kind.tiny * kind.eps
    assert got.dtype is dtype
    assert bool(((got.double() - truth).abs() <= bound).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("dim", "half"), [(16, 8), (128, 64), (64, 8)])
def test_rotations_compose(dim: int, half: int, dtype: torch.dtype) -> None:
    x, first, second = states(50, dim, dtype), positions(50, 2), positions(50, 3)
    twice = rotate(rotate(x, *table(first, half, dtype)), *table(second, half, dtype))
    once = rotate(x, *table(first + second, half, dtype))
    # One rotation errs by 3 roundings of arithmetic and 1 of the table, eps / 2 each, on |a| + |b|;
    # the first one's error and size grow by at most sqrt(2) in the second: 2 (1 + 2 sqrt(2)) < 8.
    # The three angles are rounded in float64.
    eps = torch.finfo(dtype).eps
    bound = (8 * eps + 2 * LONGEST * torch.finfo(torch.float64).eps) * size(x, half)
    assert bool(((twice - once).abs() <= bound).all())


@pytest.mark.parametrize("half", [4, 8, 16])
def test_partial_rotary_leaves_the_rest_untouched(half: int) -> None:
    x = states(20, 64)
    got = rotate(x, *table(positions(20, 4) + 1, half, torch.float32))
    assert torch.equal(got[..., 2 * half :], x[..., 2 * half :])
    assert bool((got[..., : 2 * half] != x[..., : 2 * half]).any(-1).all())


@pytest.mark.parametrize("half", [8, 32])
def test_the_norm_of_every_pair_is_kept(half: int) -> None:
    x = states(50, 64)
    got = rotate(x, *table(positions(50, 5), half, torch.float32))
    before, after = (
        torch.hypot(y[..., :half].double(), y[..., half : 2 * half].double()) for y in (x, got)
    )
    # both components err by 4 roundings of eps / 2 on |a| + |b| <= sqrt(2) times the norm
    assert bool(((after - before).abs() <= 4 * EPS * before).all())


def test_position_zero_changes_nothing() -> None:
    x = states(5, 16)
    assert torch.equal(rotate(x, *table(torch.zeros(5), 8, torch.float32)), x)


@pytest.mark.parametrize("dim", [1, 14, 15])
def test_too_few_dimensions_are_refused(dim: int) -> None:
    with pytest.raises(ValueError, match=f"dim {dim} is below twice the 8 angles"):
        rotate(states(4, dim), *table(torch.arange(4), 8, torch.float32))
