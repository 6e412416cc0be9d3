"""What attend refuses, and that an explicit choice never falls back."""

import pytest
import torch
from tests.kernels.inputs import DEVICE, place
from torch import Tensor

from redknot.kernels.attend import AttendPlan, Part, Reach, attend
from redknot.kernels.attend.choice import measured
from redknot.kernels.paging import PagedKV

IMPLS = ["auto", "reference", "torch", "triton", "flash", "flex"]


def kv(
    kv_heads: int = 2, pages: int = 2, dim: int = 32, dtype: torch.dtype = torch.float32
) -> PagedKV:
    plane = torch.zeros(kv_heads * pages, 8, dim, dtype=dtype, device=DEVICE)
    table = torch.arange(kv_heads * pages, dtype=torch.int32, device=DEVICE)
    return PagedKV(plane, plane.clone(), table.view(kv_heads, pages), kv_heads)


def query(
    heads: int = 4, rows: int = 1, dim: int = 32, dtype: torch.dtype = torch.float32
) -> Tensor:
    return torch.zeros(heads, rows, dim, dtype=dtype, device=DEVICE)


def plan(*positions: int, reaches: int = 2, request: int = 0) -> AttendPlan:
    return AttendPlan.of(Part(request, place(positions), (Reach(),) * reaches))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("q", "pages", "work", "message"),
    [
        (query(5), kv(), plan(3), "query of 5 heads of 32 for 2 KV heads of 32"),
        (query(dim=64), kv(), plan(3), "query of 4 heads of 64 for 2 KV heads of 32"),
        (query(), kv(), plan(3, reaches=1), "1 reaches for 2 KV heads"),
        (query(), kv(), plan(3, reaches=4), "4 reaches for 2 KV heads"),
        (query(rows=2), kv(), plan(3), "a query of 2 rows for a plan of 1"),
        (query(rows=0), kv(), plan(3), "a query of 0 rows for a plan of 1"),
        (query(), kv(), plan(), "a query of 1 rows for a plan of 0"),
        (query(), kv(), plan(3, request=1), "request 1 of 1"),
        (query(), kv(), plan(3, request=-1), "request -1 of 1"),
        (query(), kv(), plan(16), "rows at positions 16 to 16 in a table of 16"),
        (query(rows=2), kv(), plan(3, 17), "rows at positions 3 to 17 in a table of 16"),
        (query(), kv(), plan(-1), "rows at positions -1 to -1 in a table of 16"),
    ],
)
def test_calls_that_make_no_sense_are_refused(
    q: Tensor, pages: PagedKV, work: AttendPlan, message: str, impl: str
) -> None:
    with pytest.raises(ValueError, match=message):
        attend(q, pages, work, scale=1.0, impl=impl)


def test_parts_of_unequal_kv_heads_are_refused() -> None:
    with pytest.raises(ValueError, match="equally many KV heads"):
        AttendPlan.of(Part(0, place([1]), (Reach(),)), Part(0, place([2]), (Reach(),) * 2))


@pytest.mark.parametrize("impl", ["", "fash", "cuda"])
def test_an_unknown_implementation_is_refused(impl: str) -> None:
    with pytest.raises(ValueError, match="unknown implementation"):
        attend(query(), kv(), plan(3), scale=1.0, impl=impl)


def test_flash_does_not_take_float32() -> None:
    with pytest.raises(ValueError, match="flash runs float16 and bfloat16"):
        attend(query(), kv(), plan(3), scale=1.0, impl="flash")


@pytest.mark.skipif(DEVICE.type != "cpu", reason="a library may be installed")
def test_flash_without_a_library_does_not_fall_back() -> None:
    half = torch.float16
    with pytest.raises(ImportError, match="flash needs"):
        attend(query(dtype=half), kv(dtype=half), plan(3), scale=1.0, impl="flash")


@pytest.mark.skipif(DEVICE.type != "cpu", reason="of a CPU")
def test_auto_is_torch_on_a_cpu() -> None:
    assert measured(query(), kv(), plan(3)) == "torch"


def test_planes_of_differing_dims_are_refused() -> None:
    narrow = kv(dim=16)
    with pytest.raises(ValueError, match="dim"):
        PagedKV(kv().key, narrow.value, narrow.table, 2)


def test_planes_that_are_not_contiguous_are_refused_or_read_right() -> None:
    key = torch.randn(6, 2, 32, device=DEVICE).transpose(0, 1)  # [token, kv_head, dim] of a model
    q = torch.randn(4, 1, 32, device=DEVICE)
    try:
        pages = PagedKV.dense(key, key)
        found = attend(q, pages, plan(5), scale=1.0, impl="triton")
    except ValueError:
        return
    right = attend(q, PagedKV.dense(key.contiguous(), key.contiguous()), plan(5), scale=1.0)
    assert (found - right).abs().max() < 1e-5
