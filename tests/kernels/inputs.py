"""Random K/V behind page tables in random order, what they are made of, and poisoned memory."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from redknot.kernels.attend import AttendPlan, Part, Reach, Rows
from redknot.kernels.paging import ABSENT, PagedKV

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
HEADS = [(7, 1), (14, 2), (10, 2), (9, 3), (16, 1), (8, 8)]
DIMS = [32, 64, 80, 96, 128, 192, 256]
PAGE_SIZES = [1, 8, 16, 64, 128]
LENGTHS = [1, 127, 128, 129, 137]
NAN = float("nan")


def shown(position: int, reach: Reach) -> set[int]:
    """The definition of section 3 of the design, as a set."""
    seen = set(range(position + 1))
    if reach.window is not None:
        window = range(max(0, position - reach.window + 1), position + 1)
        seen &= set(range(min(reach.sink, position + 1))) | set(window)
    if reach.horizon is not None:
        seen &= set(range(max(0, position - reach.horizon + 1), position + 1))
    return seen


def columns(count: int, seed: int, *options: Sequence[object]) -> list[tuple[object, ...]]:
    """``count`` combinations in which each option of each list comes up about equally often."""
    shuffle = random.Random(seed)
    drawn = [(list(values) * (count // len(values) + 1))[:count] for values in options]
    for column in drawn:
        shuffle.shuffle(column)
    return list(zip(*drawn, strict=True))


def place(positions: Sequence[int] | Tensor) -> Rows:
    """Rows at ``positions``."""
    return Rows.at(torch.as_tensor(positions, dtype=torch.int64), DEVICE)


def choose(kind: str, num_tokens: int, seed: int) -> list[int]:
    """Positions of query rows: all, a suffix, some at random, or the last."""
    draw = random.Random(seed)
    if kind == "random":
        rest = [p for p in range(num_tokens - 1) if draw.random() < 0.3]
        return [*rest, num_tokens - 1]
    first = {"all": 0, "chunk": num_tokens * 2 // 3, "single": num_tokens - 1}[kind]
    return list(range(first, num_tokens))


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One request: its tokens and the rows that attend."""

    positions: Sequence[int]
    num_tokens: int
    reaches: Sequence[Reach]

    def held(self, kv_head: int, hold: str) -> set[int]:
        """Positions that must be held: what the rows see, or all rows in between as well."""
        seen: set[int] = set()
        if not len(self.positions):
            return seen
        if hold == "all":
            return set(range(self.positions[-1] + 1))
        between = range(self.positions[0], self.positions[-1] + 1)
        for position in self.positions if hold == "seen" else between:
            seen |= shown(position, self.reaches[kv_head])
        return seen


@dataclass(frozen=True, slots=True, eq=False)
class Pages:
    """K/V of some requests in float64 token by token, and the same behind a page table."""

    kv: PagedKV
    keys: list[Tensor]  # [kv_head, token, dim], rounded to the dtype of the planes
    values: list[Tensor]

    @classmethod
    def of(
        cls,
        requests: Sequence[Request],
        kv_heads: int,
        dim: int,
        *,
        dtype: torch.dtype = torch.float32,
        page_size: int = 16,
        seed: int = 0,
        junk: float = NAN,
        hold: str = "seen",
        climbing: bool = False,
        spare: int = 1,
    ) -> "Pages":
        """Pages in random order; pages that are in no table, and what lies behind the last token
        of a page, hold ``junk``; pages of which no row sees a key are absent.

        ``climbing`` orders the pages of one logical page by KV head; ``spare`` columns of the
        table are absent for every stream.
        """
        generator = torch.Generator().manual_seed(seed)
        random_states = [
            [
                torch.randn(kv_heads, r.num_tokens, dim, generator=generator, dtype=torch.float64)
                for _ in range(2)
            ]
            for r in requests
        ]
        offset = torch.arange(kv_heads)[:, None, None] % 4  # a wrong head shows in every value
        keys = [key.to(dtype).double() for key, _ in random_states]
        values = [(value + offset).to(dtype).double() for _, value in random_states]
        width = max(-(-max(r.num_tokens, 1) // page_size) for r in requests) + spare
        wanted = torch.zeros(len(requests), kv_heads, width, dtype=torch.bool)
        for index, request in enumerate(requests):
            for head in range(kv_heads):
                pages = {p // page_size for p in request.held(head, hold)}
                wanted[index, head, sorted(pages)] = True
        free = torch.randperm(int(wanted.sum()) + 3, generator=generator).to(torch.int32)
        table = torch.full(wanted.shape, ABSENT, dtype=torch.int32)
        table[wanted] = free[: int(wanted.sum())]
        if climbing:
            table = torch.where(wanted, table, len(free)).sort(1).values
            table = _spread(table, wanted)
        planes = torch.full((2, len(free), page_size, dim), junk, dtype=dtype)
        for index, head, page in wanted.nonzero().tolist():
            part = slice(page * page_size, (page + 1) * page_size)
            for plane, states in zip(planes, (keys, values), strict=True):
                fresh = states[index][head, part]
                plane[table[index, head, page], : len(fresh)] = fresh.to(dtype)
        planes = planes.to(DEVICE)
        kv = PagedKV(planes[0], planes[1], table.flatten(0, 1).to(DEVICE), kv_heads)
        return cls(kv, keys, values)


def _spread(table: Tensor, wanted: Tensor) -> Tensor:
    """Sorted pages of each (request, logical page), given to the heads that want one, in order."""
    index = (wanted.cumsum(1) - 1).clamp(min=0)
    return torch.where(wanted, table.gather(1, index), ABSENT).to(torch.int32)


def plan_of(requests: Sequence[Request]) -> AttendPlan:
    """One part for every request."""
    return AttendPlan.of(
        *(Part(i, place(r.positions), tuple(r.reaches)) for i, r in enumerate(requests))
    )


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill fresh memory with NaN, or with the lowest integer, so that a gap in a result shows."""

    def spoil(make: object) -> object:
        def made(*args: object, **options: object) -> Tensor:
            fresh = make(*args, **options)
            kind = fresh.dtype
            if kind == torch.bool:
                return fresh.fill_(True)
            whole = not (kind.is_floating_point or kind.is_complex)
            return fresh.fill_(torch.iinfo(kind).min if whole else NAN)

        return made

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in (
            (torch, "empty"),
            (torch, "empty_like"),
            (torch.Tensor, "new_empty"),
        ):
            patch.setattr(owner, name, spoil(getattr(owner, name)))
        yield
