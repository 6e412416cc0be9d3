"""Is what a call returned right? Against `impl="reference"` in float64."""

from dataclasses import dataclass

import torch
from torch import Tensor

from redknot.kernels.attend import AttendPlan, Part, Reach, Rows, attend
from redknot.kernels.paging import PagedKV

NUM_ROWS = 24


@dataclass(frozen=True, slots=True)
class Errors:
    """Norm of the difference over that of the truth: of everything, and of the worst vector."""

    total: float
    worst: float

    def passes(self, dtype: torch.dtype) -> bool:
        """NaN never does."""
        half = dtype in (torch.bfloat16, torch.float16)
        return self.total < (5e-3 if half else 1e-5) and self.worst < (2e-2 if half else 1e-4)


def errors(got: Tensor, truth: Tensor) -> Errors:
    """Compare vectors along the last dimension."""
    if got.shape != truth.shape:
        raise ValueError(f"{tuple(got.shape)} instead of {tuple(truth.shape)}")
    gap = (got.double() - truth).norm(dim=-1)
    size = truth.norm(dim=-1)
    worst = torch.where(gap == 0, gap, gap / size)
    return Errors(float(gap.norm() / size.norm()), float(worst.max()))


def same(got: Tensor, truth: Tensor) -> Errors:
    """The share of elements that differ, as an error that must be zero."""
    if got.shape != truth.shape:
        raise ValueError(f"{tuple(got.shape)} instead of {tuple(truth.shape)}")
    share = float((got != truth).double().mean())
    return Errors(share, float(share > 0))


class Oracle:
    """The true output of some rows of one request, kept for each pattern of reaches."""

    def __init__(self, q: Tensor, kv: PagedKV, positions: Tensor, scale: float) -> None:
        """Query [query_head, row, dim] at host ``positions``; the first and last row are picked."""
        middle = 1 + torch.randperm(max(0, len(positions) - 2))[: NUM_ROWS - 2]
        ends = torch.tensor([0, len(positions) - 1])
        picked = torch.cat([ends, middle]).unique()
        self._picked = picked.to(q.device)
        self._rows = Rows.at(positions[picked], q.device)
        self._query = q[:, self._picked].double()
        self._kv = PagedKV(kv.key.double(), kv.value.double(), kv.table, kv.num_kv_heads)
        self._scale = scale
        self._known: dict[tuple[Reach, ...], Tensor] = {}

    def errors(self, out: Tensor, reaches: tuple[Reach, ...]) -> Errors:
        """Of ``out`` [query_head, row, dim]."""
        return errors(out[:, self._picked].transpose(0, 1), self._truth(reaches))

    def _truth(self, reaches: tuple[Reach, ...]) -> Tensor:
        if reaches not in self._known:
            plan = AttendPlan.of(Part(0, self._rows, reaches))
            out = attend(self._query, self._kv, plan, scale=self._scale, impl="reference")
            self._known[reaches] = out.unflatten(1, (self._query.shape[0], -1))
        return self._known[reaches]
