"""Every tile shape and way of running of the Triton prefill kernel, against float64."""

import itertools
import subprocess
import sys
import textwrap

import pytest
import torch
from tests.kernels.inputs import DTYPES, Request, choose, columns, plan_of, poisoned
from tests.kernels.test_attend import Case

from redknot.kernels.attend import AttendPlan, Part, Reach, Rows
from redknot.kernels.attend import triton as kernel
from redknot.kernels.attend.triton import Config

REACHES = [Reach(), Reach(20, 4), Reach(64, 40, 100), Reach(8), Reach(horizon=70), Reach(0, 5)]
SHAPES = [(32, 16), (64, 64), (128, 128), (96, 32), (256, 64)]  # head dim, page size


def check(case: Case, config: Config) -> None:
    options = {"scale": case.scale, "config": config}
    plan, expected = plan_of(case.requests), case.truth
    with poisoned():
        expected.check(*kernel.attend(case.query, case.pages.kv, plan, return_lse=True, **options))
        out, lse = kernel.attend(case.query, case.pages.kv, plan, **options)
    expected.check(out)
    assert lse is None


@pytest.mark.parametrize(
    ("rows", "keys", "wide", "splits", "bulk", "shape", "dtype", "kind", "start"),
    columns(
        16, 11, (16, 32, 64), (16, 32, 64), (0, 1, 1, 99), (0, 1, 2, 5), (True, False),
        SHAPES, DTYPES, ("all", "chunk", "random", "single"), range(6),
    ),
)  # fmt: skip
def test_no_field_of_the_config_changes_anything_but_rounding(
    rows: int, keys: int, wide: int, splits: int, bulk: bool,
    shape: tuple[int, int], dtype: torch.dtype, kind: str, start: int,
) -> None:  # fmt: skip
    dim, page_size = shape
    reads_bulk = bulk and page_size % keys == 0 and dim in (64, 128, 256)
    reaches = [REACHES[start], REACHES[(start + 1) % 6]]
    requests = [
        Request([0, 1, 4], 5, reaches),
        Request(choose(kind, 70, start), 70, reaches[::-1]),
    ]
    case = Case.of(
        requests, (4, 2), dim, dtype=dtype, page_size=page_size, seed=start,
        junk=1e4 if reads_bulk else float("nan"), spare=24,  # for splits without keys; see below
    )  # fmt: skip
    check(case, Config(rows, keys, 4, 2, splits, wide, bulk))


@pytest.mark.parametrize("wide", [0, 1])
@pytest.mark.parametrize(
    ("reach", "first"),
    [(Reach(), 96), (Reach(64), 96), (Reach(65), 64), (Reach(63, 16), 95), (Reach(80, 4, 48), 80)],
)
def test_edges_that_fall_on_borders_of_steps(reach: Reach, first: int, wide: int) -> None:
    for shift in (-1, 0, 1):
        request = Request(range(first + shift, first + shift + 33), 140, [reach])
        check(Case.of([request], (1, 1)), Config(16, 16, wide=wide, bulk=False))


@pytest.mark.parametrize(("dim", "bulk"), [(64, True), (32, False)])
def test_rows_far_apart_in_one_tile(dim: int, bulk: bool) -> None:
    reaches = [Reach(4), Reach(4, 3), Reach(), Reach(horizon=9)]
    request = Request([0, 1, 63, 64, 65, 128, 199], 200, reaches)
    case = Case.of([request], (4, 4), dim, page_size=32, junk=1e4, spare=24)
    for splits in (1, 3):
        check(case, Config(16, 32, splits=splits, bulk=bulk))


@pytest.mark.parametrize("splits", [2, 3])
def test_sinks_count_once_over_all_splits(splits: int) -> None:
    request = Request(range(70, 80), 80, [Reach(30, 5)])
    check(Case.of([request], (1, 1), spare=24), Config(16, 16, splits=splits))


def test_splits_are_more_than_one_only_where_tiles_alone_do_not_fill_the_device() -> None:
    for tiles, tokens in itertools.product((1, 10, 132, 264, 10_000), (1, 4096, 2**20)):
        splits = kernel._splits(rows_at(tokens - 1), tiles)
        assert 1 <= splits <= max(1, kernel.SLOTS // tiles)
        assert splits == 1 or tokens // splits >= 1024


def test_tiles_that_see_little_do_not_fill_the_device() -> None:
    """Three rows of four stand at the start, or three heads of four see a window."""
    last = 2**20 - 1
    alone = kernel._splits(rows_at(last), 10)
    assert kernel._splits(rows_at(0, 1, 2, last), 40) == alone
    assert kernel._splits(rows_at(last, windows=(None, 9, 9, 9)), 40) == alone
    assert kernel._splits(rows_at(last - 3, last - 2, last - 1, last), 40) == alone // 4


def rows_at(*positions: int, windows: tuple[int | None, ...] = (None,)) -> AttendPlan:
    rows = Rows.at(torch.tensor(positions), torch.device("cpu"))
    return AttendPlan.of(Part(0, rows, tuple(Reach(window) for window in windows)))


OVERREAD = """
import sys, types
package = types.ModuleType("redknot")
package.__path__ = [sys.argv[1]]
sys.modules["redknot"] = package
import torch
from redknot.kernels.attend import AttendPlan, Part, Reach, Rows
from redknot.kernels.attend.triton import Config, attend
from redknot.kernels.paging import PagedKV
memory = torch.full((64,), 2**30, dtype=torch.int32)  # what lies behind the table
memory[:5] = torch.arange(5)
plane = torch.randn(5, 16, 32)
kv = PagedKV(plane, plane, memory[None, :5], 1)
rows = Rows.at(torch.arange(70, 80), torch.device("cpu"))
plan = AttendPlan.of(Part(0, rows, (Reach(),)))
attend(torch.randn(1, 10, 32), kv, plan, scale=1.0, config=Config(16, 16, splits=4, bulk=False))
"""


@pytest.mark.skipif(not kernel.INTERPRETED, reason="needs the interpreter")
def test_splits_without_keys_read_nothing() -> None:
    root = kernel.__file__.rsplit("/kernels/", 1)[0]
    command = [sys.executable, "-c", textwrap.dedent(OVERREAD), root]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-500:]
