"""Append: rotated keys and values stand where the table says, and nothing else is written."""

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
    """Random inputs of one call; planes hold random numbers, so that any other write shows."""

    def __init__(
        self, streams: int, rows: int, dim: int, half: int, page_size: int, *,
        dtype: torch.dtype = torch.float32, absent: float = 0.3, seed: int = 0,
    ) -> None:  # fmt: skip
        self.generator = torch.Generator().manual_seed(seed)
        width, self.half = 80 // page_size + 1, half
        pages = torch.randperm(streams * width + 4, generator=self.generator)[: streams * width]
        pages = pages.view(streams, width).int()
        pages[self.random(streams, width) < absent] = -1
        shape = (streams * width + 4, page_size, dim)
        self.planes = [self.normal(*shape).to(dtype).to(DEVICE) for _ in range(2)]
        self.kv = PagedKV(*self.planes, pages.to(DEVICE), 1)
        self.positions = torch.randperm(80, generator=self.generator)[:rows]
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
                publish=publish, impl=impl,
            )  # fmt: skip
        turned, bound = self.rotated()
        allowed = torch.zeros_like(before[0], dtype=torch.float64)
        for stream, pages in enumerate(self.kv.table.tolist()):
            for row, position in enumerate(self.positions.tolist()):
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
@pytest.mark.parametrize("absent", [0.0, 1.0])
@pytest.mark.parametrize("share", [0.0, 1.0, None])
def test_everything_or_nothing(share: float | None, absent: float, impl: str) -> None:
    write = Write(3, 20, 32, 16, 16, absent=absent)
    publish = None if share is None else torch.full((3, 20), bool(share), device=DEVICE)
    write.check(impl, publish)


@pytest.mark.parametrize("impl", IMPLS)
def test_no_rows(impl: str) -> None:
    Write(3, 0, 32, 16, 16).check(impl)


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


def test_an_unknown_implementation_is_refused() -> None:
    with pytest.raises(ValueError, match="implementation"):
        Write(2, 5, 32, 16, 16).check("tritn")
