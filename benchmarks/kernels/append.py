"""Append + relocate: un-rotated keys rotated and written into pages, beside a plain copy."""

from dataclasses import dataclass

import torch
from torch import Tensor

from redknot.kernels.append import append
from redknot.kernels.paging import PagedKV
from redknot.kernels.relocate import rotate

from .bench import Bench, Case
from .check import NUM_ROWS, Errors, errors
from .peers import Call
from .setting import Setting

LAUNCHES = 6
COPIES = 2


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """Rows of some streams and the pages that they go to."""

    key: Tensor  # [stream, row, dim]
    value: Tensor
    kv: PagedKV
    positions: Tensor
    cosine: Tensor
    sine: Tensor

    @classmethod
    def of(cls, setting: Setting, num_streams: int, num_rows: int) -> "Inputs":
        """Random ones; the pages hold NaN."""
        key, value = (setting.random(num_streams, num_rows, setting.dim) for _ in range(2))
        kv = setting.in_pages(key, value, setting.small_page)
        kv.key.fill_(torch.nan)
        kv.value.fill_(torch.nan)
        positions = torch.arange(num_rows, dtype=torch.int32, device=setting.device)
        frequency = 1e6 ** -torch.linspace(0, 1, setting.dim // 2, device=setting.device)
        angles = positions[:, None] * frequency
        return cls(key, value, kv, positions, angles.cos(), angles.sin())

    def ours(self) -> Call:
        """One launch."""

        def call() -> Tensor:
            append(
                self.kv, self.key, self.value, self.positions, self.cosine, self.sine,
                impl="triton",
            )  # fmt: skip
            return self.kv.key

        return call

    def copy(self) -> Call:
        """The same bytes, two launches."""
        key, value = torch.empty_like(self.key), torch.empty_like(self.value)

        def call() -> Tensor:
            value.copy_(self.value)
            return key.copy_(self.key)

        return call

    def errors(self) -> Errors:
        """Of some rows of every stream: rotated keys in float64, values as they are."""
        at = torch.randperm(len(self.positions), device=self.key.device)[:NUM_ROWS]
        page = self.kv.table[:, at // self.kv.page_size].long()
        key, value = (x[page, at % self.kv.page_size] for x in (self.kv.key, self.kv.value))
        angles = self.cosine[at].double(), self.sine[at].double()
        truth = torch.cat([rotate(self.key[:, at].double(), *angles), self.value[:, at].double()])
        return errors(torch.cat([key, value]), truth)


def run(bench: Bench) -> None:
    """One layer of a long prompt, and all layers of one segment."""
    setting = bench.setting
    for num_streams, num_rows in setting.appends:
        copies = [Inputs.of(setting, num_streams, num_rows) for _ in range(COPIES)]
        num_bytes = 4 * num_streams * num_rows * setting.dim * setting.dtype.itemsize
        cases = [
            Case(
                impl="triton",
                make=lambda copies=copies: [inputs.ours() for inputs in copies],
                check=lambda copy, _, copies=copies: copies[copy].errors(),
                kind="ours",
                num_bytes=num_bytes,
            ),
            Case(
                impl="copy",
                make=lambda copies=copies: [inputs.copy() for inputs in copies],
                check=lambda copy, out, copies=copies: errors(out, copies[copy].key.double()),
                num_bytes=num_bytes,
            ),
        ]
        shape = f"streams={num_streams} rows={num_rows} page={setting.small_page}"
        bench.group("append", shape, cases, launches=LAUNCHES, against=["copy"])
        del copies, cases
