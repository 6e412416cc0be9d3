"""Column mass of the probe's attention: against float64, as a distribution, and causal."""

import pytest
import torch
from torch import Tensor

from redknot.kernels.attend import Rows
from redknot.kernels.score import column_mass

EPS = torch.finfo(torch.float32).eps
SHAPES = [((8, 2), 16), ((9, 3), 64), ((14, 2), 16), ((1, 1), 16)]
ROWS = [[0], [199], [150, 151, 152, 153], [3, 40, 41, 120, 198]]


def inputs(heads: tuple[int, int], dim: int, rows: list[int]) -> tuple[Tensor, Tensor, Rows]:
    generator = torch.Generator().manual_seed(dim)
    query = torch.randn(heads[0], len(rows), dim, generator=generator)
    key = torch.randn(heads[1], 200, dim, generator=generator)
    return query, key, Rows.at(torch.tensor(rows), torch.device("cpu"))


def relative_bound(query: Tensor, key: Tensor) -> float:
    """Rounding of a probability and of its mean.

    The error ``eps * dim * size / 2`` of a score enters numerator and denominator; the sum over
    keys and the sum over rows of all query heads of a group add ``eps / 2`` for each term.
    """
    group, (num_rows, dim) = query.shape[0] // key.shape[0], query.shape[1:]
    size = float((query.abs() @ key.repeat_interleave(group, 0).abs().mT).max()) * dim**-0.5
    return EPS * ((dim + 4) * max(1.0, size) + key.shape[1] + group * num_rows + 8)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("heads", "dim"), SHAPES)
def test_mass_is_the_mean_attention_probability(
    heads: tuple[int, int], dim: int, rows: list[int]
) -> None:
    query, key, placed = inputs(heads, dim, rows)
    got = column_mass(query, key, placed, scale=dim**-0.5)
    group = heads[0] // heads[1]
    truth = torch.zeros(heads[1], 200, dtype=torch.float64)
    for head in range(heads[0]):
        for index, position in enumerate(rows):
            seen = key[head // group, : position + 1].double()
            weights = (seen @ query[head, index].double() * dim**-0.5).exp()
            truth[head // group, : position + 1] += weights / weights.sum() / (group * len(rows))
    assert got.dtype is torch.float32
    assert bool(((got - truth).abs() <= relative_bound(query, key) * truth).all())


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("heads", "dim"), SHAPES)
def test_mass_of_every_kv_head_sums_to_one(
    heads: tuple[int, int], dim: int, rows: list[int]
) -> None:
    query, key, placed = inputs(heads, dim, rows)
    mass = column_mass(query, key, placed, scale=dim**-0.5)
    assert (mass.double().sum(-1) - 1).abs().max() <= relative_bound(query, key)


@pytest.mark.parametrize("rows", ROWS)
def test_tokens_behind_all_rows_get_nothing(rows: list[int]) -> None:
    query, key, placed = inputs((8, 2), 16, rows)
    mass = column_mass(query, key, placed, scale=0.25)
    assert bool((mass[:, rows[-1] + 1 :] == 0).all())
    assert bool((mass[:, : rows[-1] + 1] > 0).all())
