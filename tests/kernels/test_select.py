"""Top-k with compaction: against NumPy's stable sort, with ties, NaN, infinities and both zeros."""

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tests.kernels.inputs import DEVICE, DTYPES, poisoned
from torch import Tensor

from redknot.kernels.select import select_top
from redknot.kernels.select import triton as kernel

IMPLS = ["torch", "triton"]
INF, NAN = float("inf"), float("nan")
QUICK = (Phase.explicit, Phase.reuse, Phase.generate)


def right(scores: Tensor, count: int, among: Tensor | None) -> list[int]:
    """NumPy sorts NaN to the end."""
    order = np.argsort(-scores.double().cpu().numpy(), kind="stable")
    if among is not None:
        order = order[among.cpu().numpy()[order]]
    return sorted(order[:count].tolist())


def check(scores: Tensor, count: int, among: Tensor | None, impl: str) -> None:
    with poisoned():
        found = select_top(scores, count, among, impl=impl)
    assert found.dtype is torch.int64
    assert found.tolist() == right(scores, count, among)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "CHUNK", 64)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 64, 500, 1025])
def test_random_scores(size: int, dtype: torch.dtype, impl: str) -> None:
    scores = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype).to(DEVICE)
    for count in {0, 1, size // 3, size - 1, size}:
        check(scores, count, None, impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("values", [[0.0], [-1.0, 0.0, -0.0, 1.0], [INF, 1.0, NAN]])
@pytest.mark.usefixtures("small_chunks")
def test_of_equal_scores_the_first_ones_win(values: list[float], impl: str) -> None:
    generator = torch.Generator().manual_seed(len(values))
    scores = torch.tensor(values)[torch.randint(len(values), (300,), generator=generator)]
    among = torch.rand(300, generator=generator) < 0.5
    for count in (1, 64, 100):
        check(scores.to(DEVICE), count, None, impl)
        check(scores.to(DEVICE), count, among.to(DEVICE), impl)
    check(scores.to(DEVICE), int(among.sum()), among.to(DEVICE), impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.usefixtures("small_chunks")
def test_scores_that_differ_in_the_last_bits_only(impl: str) -> None:
    bits = torch.randperm(150, generator=torch.Generator().manual_seed(0)).to(torch.int32)
    for start, sign in ((0x3F8003F0, 1.0), (0x3F9FFFF0, -1.0), (1, 1.0)):
        for count in (70,):
            scores = ((bits + start).view(torch.float32) * sign).to(DEVICE)
            check(scores, count, None, impl)


def _scores(low: float) -> st.SearchStrategy[list[float]]:
    """Few values, so that there are ties; ``low`` is NaN or minus infinity."""
    few = st.sampled_from([low, INF, 0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 3e38, -3e38, 1.0000001])
    anything = st.floats(width=32, allow_nan=False, allow_infinity=False)
    return st.lists(st.one_of(few, few, anything), min_size=1, max_size=150)


@settings(max_examples=60, deadline=None, phases=QUICK)
@given(data=st.data())
def test_any_scores_in_torch(data: st.DataObject) -> None:
    scores = torch.tensor(data.draw(_scores(data.draw(st.sampled_from([NAN, -INF])))))
    _any(data, scores, "torch")


@settings(max_examples=12, deadline=None, phases=QUICK)
@given(data=st.data())
def test_any_scores_in_triton(data: st.DataObject) -> None:
    scores = torch.tensor([*data.draw(_scores(NAN)), *data.draw(_scores(-INF))])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "CHUNK", 32)
        _any(data, scores, "triton")


def _any(data: st.DataObject, scores: Tensor, impl: str) -> None:
    size = len(scores)
    among = data.draw(st.lists(st.booleans(), min_size=size, max_size=size), "among")
    mask = data.draw(st.sampled_from([None, torch.tensor(among)]), "mask")
    most = size if mask is None else int(mask.sum())
    count = data.draw(st.integers(0, most), "count")
    check(scores.to(DEVICE), count, None if mask is None else mask.to(DEVICE), impl)


@pytest.mark.parametrize("impl", IMPLS)
def test_strided_scores(impl: str) -> None:
    scores = torch.randn(90, 2, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    check(scores[:, 1], 30, (scores > -1)[:, 0], impl)


@pytest.mark.parametrize("impl", ["auto", *IMPLS])
def test_calls_that_make_no_sense_are_refused(impl: str) -> None:
    scores = torch.zeros(5, device=DEVICE)
    for count in (-1, 6):
        with pytest.raises(ValueError, match=f"{count} of 5 tokens"):
            select_top(scores, count, impl=impl)
    with pytest.raises(ValueError, match="candidates"):
        select_top(scores, 1, torch.ones(4, dtype=torch.bool, device=DEVICE), impl=impl)


def test_nan_ranks_below_minus_infinity_in_torch() -> None:
    check(torch.tensor([NAN, -INF, NAN, 1.0]).to(DEVICE), 2, None, "torch")


def test_nan_ranks_below_minus_infinity_in_triton() -> None:
    check(torch.tensor([NAN, -INF, NAN, 1.0]).to(DEVICE), 2, None, "triton")


def test_float64_scores_keep_their_digits_or_are_refused() -> None:
    scores = (1 + torch.arange(5, dtype=torch.float64) * 1e-12).to(DEVICE)
    check(scores, 2, None, "auto")
    with pytest.raises(ValueError, match="float64"):
        select_top(scores, 2, impl="triton")


def test_an_unknown_implementation_is_refused() -> None:
    with pytest.raises(ValueError, match="implementation"):
        select_top(torch.zeros(3, device=DEVICE), 1, impl="tritn")
