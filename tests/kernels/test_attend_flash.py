"""Runs of heads, layouts and sinks around a FlashAttention library, which is played by a fake."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from tests.kernels.inputs import Request, plan_of, poisoned
from tests.kernels.test_attend import Case
from torch import Tensor

from redknot.kernels.attend import Reach, flash
from redknot.kernels.paging import PagedKV

HALVES = [torch.float16, torch.bfloat16]
PATTERNS = [
    [Reach(), Reach(8, 4), Reach(8, 4), Reach(16), Reach()],
    [Reach(8, 4), Reach(8, 20), Reach(1), Reach(24, 4, 12), Reach(8, 20, 40)],
    [Reach(8, 4, 30)] * 5,
    [Reach(0, 3), Reach(0, 40), Reach(64, 30), Reach(horizon=9), Reach(200, 4)],
    [Reach(1, 1), Reach(16, 17), Reach(17, 16), Reach(32, 33), Reach(40, 1)],
]


class Library:
    """Causal windowed attention in float64, aligned at the ends; without keys: zero, +inf."""

    def __init__(self) -> None:
        self.windows: list[int | None] = []

    def __call__(
        self, query: Tensor, kv: PagedKV, table: Tensor, tokens: Tensor,
        window: int | None, scale: float, out: Tensor,
    ) -> Tensor:  # fmt: skip
        self.windows.append(window)
        assert len(query) == len(table) == len(tokens) == len(out)
        assert bool((table >= 0).all())
        num_rows, group = query.shape[1:3]
        lse = torch.full((len(query), group, num_rows), float("inf"), device=query.device)
        for sequence, row in itertools.product(range(len(query)), range(num_rows)):
            own = int(tokens[sequence]) - num_rows + row
            keys = torch.arange(0 if window is None else max(0, own - window + 1), own + 1)
            pages = table[sequence, keys // kv.page_size].long()
            key, value = (p[pages, keys % kv.page_size].double() for p in (kv.key, kv.value))
            if not len(keys):
                out[sequence, row] = 0
                continue
            scores = query[sequence, row].double() @ key.T * scale
            out[sequence, row] = (scores.softmax(-1) @ value).to(out.dtype)
            lse[sequence, :, row] = scores.logsumexp(-1).float()
        return lse


@pytest.mark.parametrize("heads", [(5, 5), (15, 5)])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("reaches", PATTERNS)
def test_calls_and_folded_sinks_are_attention(
    reaches: list[Reach], dtype: torch.dtype, heads: tuple[int, int]
) -> None:
    requests = [
        Request(range(50, 67), 70, reaches),
        Request([4], 5, reaches[::-1]),
        Request(range(30), 30, reaches),
    ]
    case = Case.of(requests, heads, dtype=dtype, page_size=8, junk=1e4)
    library, plan = Library(), plan_of(requests)
    options = {"scale": case.scale, "forward": library}
    with poisoned():
        out, lse = flash.attend(case.query, case.pages.kv, plan, return_lse=True, **options)
        again, none = flash.attend(case.query, case.pages.kv, plan, **options)
    case.truth.check(out, lse)
    assert torch.equal(again, out)
    assert none is None
    runs = [[reach for reach, _ in itertools.groupby(r.reaches)] for r in requests]
    # a window of nothing is not the library's to run
    spans = [reach.span for run in runs for reach in run if reach.span != 0]
    assert library.windows == spans * 2


@pytest.mark.parametrize("dim", [64, 80, 128])
@pytest.mark.parametrize("page_size", [1, 16, 128])
def test_sinks_over_pages_and_dims(page_size: int, dim: int) -> None:
    requests = [Request(range(60, 100), 100, [Reach(8, 4), Reach(20, 37)])]
    case = Case.of(requests, (14, 2), dim, dtype=torch.float16, page_size=page_size)
    with poisoned():
        out, lse = flash.attend(
            case.query, case.pages.kv, plan_of(requests), scale=case.scale, return_lse=True,
            forward=Library(),
        )  # fmt: skip
    case.truth.check(out, lse)


def test_absent_sinks_behind_the_horizon_are_not_read() -> None:
    requests = [Request(range(50, 67), 70, [Reach(8, 20, 40)])]
    case = Case.of(requests, (1, 1), dtype=torch.float16, page_size=8)
    out, _ = flash.attend(
        case.query, case.pages.kv, plan_of(requests), scale=case.scale, forward=Library()
    )
    case.truth.check(out)


@pytest.mark.parametrize("row_block", [4, 16, 1000])
@pytest.mark.parametrize("reach", [Reach(), Reach(8, 4), Reach(horizon=20)])
def test_gathered_rows(reach: Reach, row_block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "ROW_BLOCK", row_block)
    positions = [3, 4, 9, 10, 11, 30, 31, 50, 63, 64, 65, 70, 71, 72, 90, 91, 92, 93]
    requests = [Request(positions, 100, [reach, Reach()]), Request([0, 6], 7, [Reach(), reach])]
    case = Case.of(requests, (6, 2), dtype=torch.float16, page_size=8, hold="all")
    with poisoned():
        out, lse = flash.attend(
            case.query,
            case.pages.kv,
            plan_of(requests),
            scale=case.scale,
            return_lse=True,
            forward=Library(),
        )
    case.truth.check(out, lse)


def test_rows_without_a_key_have_minus_infinity() -> None:
    """KN-01."""
    case = Case.of([Request([3, 4], 5, [Reach(0)])], (2, 1), dtype=torch.float16, hold="all")
    out, lse = flash.attend(
        case.query, case.pages.kv, plan_of(case.requests), scale=1.0, return_lse=True,
        forward=Library(),
    )  # fmt: skip
    case.truth.check(out, lse)


@pytest.mark.parametrize(
    ("window", "left", "right"),
    [
        (None, -1, -1),
        (1, 0, 0),
        (256, 255, 0),
    ],
)
def test_the_window_that_flash_attention_3_is_given(
    window: int | None, left: int, right: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, int] = {}

    def forward(*args: object, **options: int) -> tuple[None, None]:
        given.update(options)
        return None, None

    monkeypatch.setattr(torch.ops, "_vllm_fa3_C", SimpleNamespace(fwd=forward), raising=False)
    plane = torch.zeros(1, 8, 32)
    kv = PagedKV(plane, plane, torch.zeros(1, 1, dtype=torch.int32), 1)
    flash.fa3(torch.zeros(1, 2, 1, 32), kv, kv.table, torch.tensor([2]), window, 1.0, plane)
    seen = (given["window_size_left"], given["window_size_right"])
    assert seen == (left, right) if window != 0 else seen[0] != -1
