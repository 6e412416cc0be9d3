"""Attention of gathered rows: against float64, loops over explicit sets, and PyTorch's own."""

import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from redknot.kernels.attend import Reach, Rows, attend

CPU = torch.device("cpu")
EPS = torch.finfo(torch.float32).eps
REACHES = [
    Reach(window, sink, horizon)
    for window, sink, horizon in itertools.product((None, 1, 8, 64), (0, 4, 64), (None, 16))
    if window is not None or sink == 0
]


@dataclass(frozen=True)
class Case:
    """Random float32 inputs of one call."""

    query: Tensor
    key: Tensor
    value: Tensor
    rows: Rows

    @property
    def scale(self) -> float:
        return self.query.shape[-1] ** -0.5

    def run(self, reaches: list[Reach], **options: object) -> Tensor:
        return attend(
            self.query, self.key, self.value, self.rows, reaches, scale=self.scale, **options
        )

    def truth(self, reaches: list[Reach]) -> Tensor:
        return attend(
            self.query.double(),
            self.key.double(),
            self.value.double(),
            self.rows,
            reaches,
            scale=self.scale,
            impl="reference",
        )

    @property
    def bound(self) -> float:
        """Rounding of the output, an average of values with weights exp(score).

        A score is a product sum of ``dim`` terms whose magnitudes add up to ``size``: its error
        ``eps * dim * size / 2`` enters numerator and denominator, as do the sums over keys with
        ``eps * keys / 2`` and the exponential, the shift by the maximum and the division with a few
        roundings. Half as much again comes in where two parts of the keys are merged: their shares
        err as the denominators do, and shift the output by at most half of that times the values.
        """
        group = self.query.shape[0] // self.key.shape[0]
        keys = self.key.repeat_interleave(group, 0).abs()
        size = float((self.query.abs() @ keys.mT).max()) * self.scale
        dim, num_keys = self.query.shape[-1], self.key.shape[1]
        return (
            1.5 * EPS * ((dim + 4) * max(1.0, size) + num_keys + 8) * float(self.value.abs().max())
        )


def case(
    num_tokens: int,
    positions: Tensor,
    heads: tuple[int, int] = (8, 2),
    dim: int = 16,
    seed: int = 0,
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    shapes = (heads[0], len(positions), dim), *[(heads[1], num_tokens, dim)] * 2
    return Case(
        *(torch.randn(*shape, generator=generator) for shape in shapes), Rows.at(positions, CPU)
    )


def shown(position: int, reach: Reach) -> set[int]:
    """The definition of section 3 of the design, as a set."""
    seen = set(range(position + 1))
    if reach.window is not None:
        window = set(range(position - reach.window + 1, position + 1))
        seen &= set(range(reach.sink)) | window
    if reach.horizon is not None:
        seen &= set(range(position - reach.horizon + 1, position + 1))
    return seen


def loops(inputs: Case, reaches: list[Reach]) -> np.ndarray:
    """Attention by loops over sets of keys, in NumPy and float64."""
    query, key, value = (x.double().numpy() for x in (inputs.query, inputs.key, inputs.value))
    group = query.shape[0] // key.shape[0]
    out = np.zeros((query.shape[1], query.shape[0], query.shape[2]))
    for head, row in itertools.product(range(query.shape[0]), range(query.shape[1])):
        seen = shown(int(inputs.rows.host[row]), reaches[head // group])
        weights = {
            j: math.exp(inputs.scale * sum(query[head, row] * key[head // group, j])) for j in seen
        }
        for j, weight in weights.items():
            out[row, head] += weight / sum(weights.values()) * value[head // group, j]
    return out.reshape(query.shape[1], -1)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_gathered_rows_agree_with_float64(data: st.DataObject) -> None:
    heads = data.draw(st.sampled_from([(8, 2), (9, 3), (14, 2)]), "heads")
    reaches = data.draw(st.lists(st.sampled_from(REACHES), min_size=heads[1], max_size=heads[1]))
    num_tokens = data.draw(st.integers(1, 400), "tokens")
    seed = data.draw(st.integers(0, 2**16), "seed")
    share = data.draw(st.sampled_from([0.02, 0.3, 1.0]), "share of rows")
    chosen = torch.rand(num_tokens, generator=torch.Generator().manual_seed(seed)) < share
    chosen[data.draw(st.integers(0, num_tokens - 1), "a row")] = True
    inputs = case(
        num_tokens,
        chosen.nonzero().flatten(),
        heads,
        data.draw(st.sampled_from([16, 64]), "dim"),
        seed,
    )
    row_block = data.draw(st.sampled_from([1, 7, None]), "row block")
    got = inputs.run(reaches, impl="torch", row_block=row_block)
    assert (got.double() - inputs.truth(reaches)).abs().max() <= inputs.bound


@pytest.mark.parametrize("impl", ["reference", "torch"])
@pytest.mark.parametrize(
    "reach",
    [
        Reach(),
        Reach(1),
        Reach(4, 2),
        Reach(4, 6),
        Reach(8, 4),
        Reach(64, 4),
        Reach(horizon=3),
        Reach(4, 2, 6),
        Reach(4, 8, 10),
        Reach(8, 2, 3),
    ],
)
def test_sets_of_keys_in_plain_loops_agree(reach: Reach, impl: str) -> None:
    inputs = case(14, torch.tensor([0, 1, 5, 6, 9, 13]), (4, 2))
    reaches = [reach, Reach(3, 1)]
    got = inputs.run(reaches, impl=impl)
    assert np.abs(got.double().numpy() - loops(inputs, reaches)).max() <= inputs.bound


@pytest.mark.parametrize("impl", ["reference", "torch"])
@pytest.mark.parametrize(("window", "sink"), [(8, 4), (8, 64), (39, 4), (40, 40), (64, 0)])
def test_a_sink_inside_the_window_counts_once(window: int, sink: int, impl: str) -> None:
    positions = torch.arange(40)
    inputs = case(40, positions)
    mask = torch.zeros(40, 40, dtype=torch.bool)
    for position in range(40):
        mask[position, list(range(min(sink, position + 1)))] = True
        mask[position, list(range(max(0, position - window + 1), position + 1))] = True
    keys, values = (x.double().repeat_interleave(4, 0) for x in (inputs.key, inputs.value))
    truth = F.scaled_dot_product_attention(inputs.query.double(), keys, values, attn_mask=mask)
    got = inputs.run([Reach(window, sink)] * 2, impl=impl)
    assert (got.double() - truth.transpose(0, 1).flatten(1)).abs().max() <= inputs.bound


@pytest.mark.parametrize("num_tokens", [1, 7, 300])
@pytest.mark.parametrize("reach", [Reach(), Reach(300, 4), Reach(horizon=300)])
def test_consecutive_rows_that_see_everything_equal_causal_attention(
    num_tokens: int, reach: Reach
) -> None:
    inputs = case(num_tokens, torch.arange(num_tokens))
    keys, values = (x.double().repeat_interleave(4, 0) for x in (inputs.key, inputs.value))
    truth = F.scaled_dot_product_attention(inputs.query.double(), keys, values, is_causal=True)
    got = inputs.run([reach] * 2, impl="torch")
    assert (got.double() - truth.transpose(0, 1).flatten(1)).abs().max() <= inputs.bound


@pytest.mark.parametrize("row_block", [1, 7, None])
@pytest.mark.parametrize("plane", ["key", "value"])
@pytest.mark.parametrize("token", [0, 3, 40, 77])
def test_a_token_changes_exactly_the_rows_and_heads_that_see_it(
    token: int, plane: str, row_block: int | None
) -> None:
    positions = torch.tensor([0, 2, 3, 10, 40, 41, 47, 48, 55, 56, 60, 77, 79])
    reaches = [Reach(8, 4), Reach(1), Reach(), Reach(16, 2, 40), Reach(horizon=16)]
    inputs = case(80, positions, (10, 5))
    before = inputs.run(reaches, impl="torch", row_block=row_block)
    getattr(inputs, plane)[:, token] += 1
    after = inputs.run(reaches, impl="torch", row_block=row_block)
    changed = (before != after).view(len(positions), 5, -1).any(-1)
    expected = [[token in shown(p, reach) for reach in reaches] for p in positions.tolist()]
    if plane == "key":  # the only key that a row sees has weight 1 whatever it is
        alone = [[len(shown(p, reach)) == 1 for reach in reaches] for p in positions.tolist()]
        changed |= torch.tensor(expected) & torch.tensor(alone)
    assert torch.equal(changed, torch.tensor(expected))


@pytest.mark.parametrize("impl", ["reference", "torch"])
def test_a_row_beyond_the_keys_is_refused(impl: str) -> None:
    with pytest.raises(ValueError, match="row at position 10 but only 10 keys"):
        case(10, torch.tensor([3, 10])).run([Reach(), Reach()], impl=impl)


@pytest.mark.parametrize("count", [0, 1, 3, 8])
def test_a_wrong_number_of_reaches_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match=f"2 KV heads, {count} reaches"):
        case(10, torch.tensor([3])).run([Reach()] * count)
