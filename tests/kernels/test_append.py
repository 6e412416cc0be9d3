"""Append: rotated keys and values stand where the table says, and nothing else is written."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from tests.kernels.inputs import DEVICE, DTYPES, columns, poisoned
from tests.kernels.test_relocate import size, table
from torch import Tensor

from redknot.kernels.append import append
from redknot.kernels.paging import PagedKV
from redknot.kernels.relocate import rotate

IMPLS = ["torch", "triton"]
EPS = torch.finfo(torch.float32).eps


class Write:
    """Random inputs of one call; planes hold random numbers, so that any other write shows.

    With ``one_each`` the streams are the KV heads of as many requests as there are rows.
    """

    def __init__(
        self, streams: int, rows: int, dim: int, half: int, page_size: int, *,
        dtype: torch.dtype = torch.float32, absent: float = 0.3, seed: int = 0,
        one_each: bool = False,
    ) -> None:  # fmt: skip
        self.generator = torch.Generator().manual_seed(seed)
        width, self.half, self.one_each = 80 // page_size + 1, half, one_each
        tables = streams * rows if one_each else streams
        pages = torch.randperm(tables * width + 4, generator=self.generator)[: tables * width]
        pages = pages.view(tables, width).int()
        pages[self.random(tables, width) < absent] = -1
        shape = (tables * width + 4, page_size, dim)
        self.planes = [self.normal(*shape).to(dtype).to(DEVICE) for _ in range(2)]
        self.kv = PagedKV(*self.planes, pages.to(DEVICE), streams if one_each else 1)
        self.positions = torch.randperm(80, generator=self.generator)[:rows]
        if one_each:  # requests may stand at the same position
            self.positions = torch.randint(80, (rows,), generator=self.generator)
        angles = table(self.positions, half, torch.float32)
        self.cosine, self.sine = (x.to(DEVICE) for x in angles)
        self.key, self.value = (
            self.normal(rows, streams, dim).to(dtype).to(DEVICE).transpose(0, 1) for _ in range(2)
        )

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def random(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator)

    def check(self, impl: str, publish: Tensor | None = None) -> None:
        before = [plane.clone() for plane in self.planes]
        with poisoned():
            append(
                self.kv, self.key, self.value, self.positions.to(DEVICE), self.cosine, self.sine,
                publish=publish, one_each=self.one_each, impl=impl,
            )  # fmt: skip
        turned, bound = self.rotated()
        allowed = torch.zeros_like(before[0], dtype=torch.float64)
        tables = self.kv.table.tolist()
        for stream in range(len(self.key)):
            for row, position in enumerate(self.positions.tolist()):
                pages = tables[row * len(self.key) + stream if self.one_each else stream]
                page, offset = pages[position // self.kv.page_size], position % self.kv.page_size
                if page < 0 or (publish is not None and not publish[stream, row]):
                    continue
                before[0][page, offset] = turned[stream, row]
                allowed[page, offset] = bound[stream, row]
                before[1][page, offset] = self.value[stream, row].to(before[1].dtype)
        assert bool(((self.planes[0].double() - before[0].double()).abs() <= allowed).all())
        assert torch.equal(self.planes[1], before[1])

    def rotated(self) -> tuple[Tensor, Tensor]:
        """By `rotate` in the dtype of the plane, and by how much a fused product may differ.

        Both err by 3 roundings of EPS / 2 on |a| + |b|; each is rounded once to the plane.
        """
        plane = self.planes[0].dtype
        turned = rotate(self.key.to(torch.float32), self.cosine, self.sine).to(plane)
        once = torch.finfo(plane)
        bound = 3 * EPS * size(self.key, self.half)
        if plane != torch.float32:
            bound = bound + once.eps * turned.double().abs() + once.tiny * once.eps
        return turned, torch.where(bound > 0, bound, 0)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("streams", "rows", "dims", "page_size", "dtype", "masked"),
    columns(
        18, 1, (1, 2, 7, 8, 9, 17), (1, 15, 16, 17, 33, 80),
        ((32, 16), (64, 32), (80, 40), (96, 48), (128, 64), (64, 8), (256, 64)),
        (1, 8, 16, 64), DTYPES, (False, True),
    ),
)  # fmt: skip
def test_rows_are_rotated_and_put_in_their_place(
    streams: int, rows: int, dims: tuple[int, int], page_size: int, dtype: torch.dtype,
    masked: bool, impl: str,
) -> None:  # fmt: skip
    write = Write(streams, rows, *dims, page_size, dtype=dtype, seed=streams)
    publish = (write.random(streams, rows) < 0.5).to(DEVICE) if masked else None
    write.check(impl, publish)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("heads", "requests", "dims", "page_size", "dtype", "masked"),
    columns(
        18, 2, (1, 2, 7, 8, 9), (1, 2, 15, 16, 17, 33),
        ((32, 16), (64, 32), (80, 40), (96, 48), (128, 64), (64, 8), (256, 64)),
        (1, 8, 16, 64), DTYPES, (False, True),
    ),
)  # fmt: skip
def test_one_row_of_each_request_goes_to_the_pages_of_that_request(
    heads: int, requests: int, dims: tuple[int, int], page_size: int, dtype: torch.dtype,
    masked: bool, impl: str,
) -> None:  # fmt: skip
    write = Write(heads, requests, *dims, page_size, dtype=dtype, seed=heads, one_each=True)
    publish = (write.random(heads, requests) < 0.5).to(DEVICE) if masked else None
    write.check(impl, publish)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("one_each", [False, True])
@pytest.mark.parametrize("absent", [0.0, 1.0])
@pytest.mark.parametrize("share", [0.0, 1.0, None])
def test_everything_or_nothing(
    share: float | None, absent: float, one_each: bool, impl: str
) -> None:
    write = Write(3, 20, 32, 16, 16, absent=absent, one_each=one_each)
    publish = None if share is None else torch.full((3, 20), bool(share), device=DEVICE)
    write.check(impl, publish)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("one_each", [False, True])
def test_no_rows(one_each: bool, impl: str) -> None:
    Write(3, 0, 32, 16, 16, one_each=one_each).check(impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("states", "plane"), [(torch.float32, torch.float16), (torch.float16, torch.float32)]
)
def test_states_are_rounded_once_to_the_dtype_of_the_plane(
    states: torch.dtype, plane: torch.dtype, impl: str
) -> None:
    write = Write(2, 20, 32, 16, 16, dtype=plane)
    write.key, write.value = (x.float().mul(1.01).to(states) for x in (write.key, write.value))
    write.check(impl)


@pytest.mark.parametrize("impl", ["auto", *IMPLS])
def test_shapes_that_make_no_sense_are_refused(impl: str) -> None:
    write = Write(2, 5, 32, 16, 16)
    kv, at, angles = write.kv, write.positions.to(DEVICE), (write.cosine, write.sine)
    for message, call in (
        ("values", (kv, write.key, write.value[:, :4], at, *angles)),
        ("2 streams", (kv, write.key[:1], write.value[:1], at, *angles)),
        ("5 rows at 4 positions", (kv, write.key, write.value, at[:4], *angles)),
        ("4 angles", (kv, write.key, write.value, at, angles[0][:4], angles[1])),
        ("below twice", (kv, write.key[..., :30], write.value[..., :30], at, *angles)),
    ):
        with pytest.raises(ValueError, match=message):
            append(*call, impl=impl)


@pytest.mark.parametrize("impl", ["auto", *IMPLS])
def test_rows_that_are_not_one_of_each_request_are_refused(impl: str) -> None:
    write = Write(2, 5, 32, 16, 16, one_each=True)
    kv, at, angles = write.kv, write.positions.to(DEVICE), (write.cosine, write.sine)
    for message, call in (
        ("2 KV heads", (kv, write.key[:1], write.value[:1], at, *angles)),
        ("4 rows, one each of 5 requests",
         (kv, write.key[:, :4], write.value[:, :4], at[:4], *(x[:4] for x in angles))),
        ("5 rows at 4 positions", (kv, write.key, write.value, at[:4], *angles)),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            append(*call, one_each=True, impl=impl)
    with pytest.raises(ValueError, match="10 streams"):
        append(kv, write.key, write.value, at, *angles, impl=impl)


@contextmanager
def compilations() -> Iterator[list[str]]:
    """Names of the kernels that are compiled for arguments unlike those before."""
    from triton import knobs

    names: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(knobs.runtime, "jit_cache_hook", lambda *, fn, **_: names.append(fn.name))
        yield names


@pytest.mark.skipif(DEVICE.type != "cuda", reason="nothing is compiled on a CPU")
def test_one_compilation_serves_any_number_of_rows_and_pages() -> None:
    for turn, (rows, one_each) in enumerate(itertools.product((7, 1, 16, 33), (False, True))):
        write = Write(2, rows, 96, 48, 16, one_each=one_each)
        write.kv = replace(write.kv, table=write.kv.table.repeat(1, rows))
        with compilations() as names:
            write.check("triton")
        assert not turn or not names


def test_an_unknown_implementation_is_refused() -> None:
    with pytest.raises(ValueError, match="implementation"):
        Write(2, 5, 32, 16, 16).check("tritn")
