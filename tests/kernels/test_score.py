"""Column mass of the probe's attention: against float64, as a distribution, and causal."""

from collections.abc import Sequence

import pytest
import torch
from tests.kernels.inputs import (
    DEVICE,
    DIMS,
    DTYPES,
    HEADS,
    Pages,
    Request,
    columns,
    place,
    poisoned,
    shown,
)
from torch import Tensor

from redknot.kernels.attend import Reach
from redknot.kernels.score import column_mass

EPS = torch.finfo(torch.float32).eps
IMPLS = ["torch", "triton"]
ROWS = [
    [0],
    [129],
    [100, 101, 102, 103],
    [3, 40, 41, 120, 128],
    [126, 127],
    [127, 128],
    list(range(60)),
]
HORIZONS = [None, None, 1, 30, 500]


class Probe:
    """Random inputs, the right mass, and how far rounding may lead away from it."""

    def __init__(
        self, rows: Sequence[int], heads: tuple[int, int], dim: int, *, seed: int = 0,
        dtype: torch.dtype = torch.float32, horizon: int | None = None, page_size: int = 16,
    ) -> None:  # fmt: skip
        reach = Reach(horizon=horizon)
        mine = Request(rows, rows[-1] + 3, [reach] * heads[1])
        other = Request([9], 10, [Reach()] * heads[1])
        self.pages = Pages.of(
            [other, mine], heads[1], dim, dtype=dtype, page_size=page_size, hold="between",
            climbing=True, seed=seed,
        )  # fmt: skip
        self.rows, self.horizon, self.scale = rows, horizon, dim**-0.5
        generator = torch.Generator().manual_seed(seed)
        query = torch.randn(heads[0], len(rows), dim, generator=generator).to(dtype)
        self.query = query.to(DEVICE)
        group = heads[0] // heads[1]
        key = self.pages.keys[1].repeat_interleave(group, 0)[:, : rows[-1] + 1]
        mask = torch.zeros(len(rows), rows[-1] + 1, dtype=torch.bool)
        for index, position in enumerate(rows):
            mask[index, sorted(shown(position, reach))] = True
        scores = (query.double() * self.scale) @ key.mT
        weights = torch.where(mask, scores.exp(), 0)
        right = weights / weights.sum(-1, keepdim=True)
        self.lse = scores.masked_fill(~mask, float("-inf")).logsumexp(-1).float().to(DEVICE)
        self.mass = right.unflatten(0, (heads[1], group)).mean((1, 2))
        size = (query.double().abs() * self.scale) @ key.abs().mT
        wrong = right * self.error(size, dim, dtype)
        self.bound = wrong.unflatten(0, (heads[1], group)).mean((1, 2))
        self.bound += EPS * (len(rows) * group + 4) * self.mass + torch.finfo(torch.float32).tiny

    def error(self, size: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
        """Relative error of a probability, exp(score - lse).

        A score is a sum of ``dim`` products of magnitudes that add up to ``size``, scaled, times
        log2(e), less the log-sum-exp, which is rounded itself: EPS * ((dim + 4) * size + 2 |lse|);
        the exponential errs by 2 EPS. PyTorch in a half precision rounds the scaled query and the
        score, each by half an epsilon of it. The mean adds an EPS for each row of the group.
        """
        lse = self.lse.cpu().double().abs()[..., None]
        half = torch.finfo(dtype).eps if dtype != torch.float32 else 0.0
        return torch.expm1(EPS * ((dim + 4) * size + 2 * lse + 2) + half * size)

    def run(self, impl: str) -> Tensor:
        with poisoned():
            return column_mass(
                self.query, self.pages.kv, place(self.rows), self.lse, scale=self.scale,
                horizon=self.horizon, request=1, impl=impl,
            )  # fmt: skip

    def check(self, found: Tensor) -> None:
        assert found.dtype is torch.float32
        assert found.shape == self.mass.shape
        assert bool(((found.cpu().double() - self.mass).abs() <= self.bound).all())


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("rows", "heads", "dim", "dtype", "horizon", "page_size"),
    columns(20, 2, ROWS, HEADS, DIMS, DTYPES, HORIZONS, [1, 8, 16, 64, 128]),
)
def test_mass_is_the_mean_attention_probability(
    rows: list[int], heads: tuple[int, int], dim: int, dtype: torch.dtype, horizon: int | None,
    page_size: int, impl: str,
) -> None:  # fmt: skip
    probe = Probe(rows, heads, dim, dtype=dtype, horizon=horizon, page_size=page_size)
    found = probe.run(impl)
    probe.check(found)
    total = found.cpu().double().sum(-1)
    assert bool(((total - 1).abs() <= probe.bound.sum(-1)).all())


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("horizon", [None, 20, 32, 33])
def test_keys_that_no_row_sees_get_exactly_nothing(horizon: int | None, impl: str) -> None:
    probe = Probe([70, 71, 96, 97], (4, 2), 32, horizon=horizon)
    found = probe.run(impl).cpu()
    assert torch.equal(found == 0, probe.mass == 0)


@pytest.mark.parametrize(
    "rows", [[32], [31, 33], [30, 31, 40], [5, 31, 32, 47, 48, 80], list(range(16, 64))]
)
@pytest.mark.parametrize("horizon", [None, 1, 16, 17, 40])
@pytest.mark.parametrize(("keys", "block"), [(16, 16), (32, 64)])
def test_borders_of_keys_and_rows_of_a_program(
    keys: int, block: int, horizon: int | None, rows: list[int]
) -> None:
    from redknot.kernels.score import triton as kernel

    probe = Probe(rows, (6, 2), 32, horizon=horizon, seed=keys)
    with poisoned():
        found = kernel.column_mass(
            probe.query, probe.pages.kv, place(rows), probe.lse, scale=probe.scale,
            horizon=horizon, request=1, config=kernel.Config(keys, block),
        )  # fmt: skip
    probe.check(found)


@pytest.mark.parametrize("impl", IMPLS)
def test_strides_of_the_query_do_not_matter(impl: str) -> None:
    probe = Probe([3, 40, 41], (4, 2), 32)
    probe.query = probe.query.transpose(0, 1).contiguous().transpose(0, 1)
    probe.lse = probe.lse.T.contiguous().T
    probe.check(probe.run(impl))


@pytest.mark.parametrize("impl", ["auto", *IMPLS])
def test_wrong_shapes_are_refused(impl: str) -> None:
    probe = Probe([3, 40], (4, 2), 32)
    query, kv, lse, rows = probe.query, probe.pages.kv, probe.lse, place(probe.rows)
    for message, call in (
        ("query of 3 heads", (query[:3], kv, rows, lse[:3])),
        ("1 rows for 2 KV heads and 2 positions", (query[:, :1], kv, rows, lse[:, :1])),
        ("log-sum-exp of shape", (query, kv, rows, lse[:, :1])),
        ("row at position 400", (query, kv, place([3, 400]), lse)),
    ):
        with pytest.raises(ValueError, match=message):
            column_mass(*call, scale=1.0, impl=impl)


@pytest.mark.parametrize("request_id", [-1, 2])
def test_a_request_that_is_not_there_is_refused(request_id: int) -> None:
    probe = Probe([3, 40], (4, 2), 32)
    with pytest.raises(ValueError, match="request"):
        column_mass(
            probe.query, probe.pages.kv, place([3, 40]), probe.lse, scale=1.0, request=request_id,
            impl="torch",
        )  # fmt: skip


def test_an_unknown_implementation_is_refused() -> None:
    probe = Probe([3, 40], (4, 2), 32)
    with pytest.raises(ValueError, match="implementation"):
        probe.run("tritn")
