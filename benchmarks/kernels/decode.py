"""Decode: one row of every request, from CUDA graphs as an engine runs it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from redknot.kernels.attend import (
    AttendPlan,
    DecodePlan,
    Part,
    Reach,
    Rows,
    attend,
    attend_decode,
)
from redknot.kernels.paging import PagedKV

from . import peers
from .bench import Bench, Case
from .check import Errors, errors
from .peers import Call, Decode
from .setting import Setting

LAUNCHES = 12
COPIES = 2
"Of the inputs, so that nothing visible stays in the L2 cache until its turn comes again."


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """One copy of a batch."""

    setting: Setting
    p: Decode
    kv: PagedKV

    @classmethod
    def of(cls, setting: Setting, num_requests: int, tokens: int) -> "Inputs":
        """Random ones."""
        q = setting.random(num_requests, setting.num_query_heads, setting.dim)
        k, v = (
            setting.random(num_requests, setting.num_kv_heads, tokens, setting.dim)
            for _ in range(2)
        )
        kv = setting.in_pages(k.flatten(0, 1), v.flatten(0, 1), setting.small_page)
        k, v = (x.transpose(1, 2).contiguous() for x in (k, v))
        windows = setting.windows_by_head(setting.windows[0])
        return cls(setting, Decode(q, k, v, windows, setting.scale), kv)

    @property
    def tokens(self) -> int:
        """Length of every request, the new token included."""
        return self.p.k.shape[1]

    def ours(self) -> Call:
        """The Triton kernel; the plan is made once for all layers."""
        num_requests, device = len(self.p.q), self.setting.device
        reaches = self.setting.reaches(self.setting.windows[0])
        plan = DecodePlan.of([self.tokens] * num_requests, reaches, device)
        positions = torch.full((num_requests,), self.tokens - 1, dtype=torch.int32, device=device)

        def call() -> Tensor:
            out = attend_decode(
                self.p.q, self.kv, plan, positions, scale=self.p.scale, impl="triton"
            )
            return out.view_as(self.p.q)

        return call

    def errors(self, out: Tensor, reaches: tuple[Reach, ...]) -> Errors:
        """Of every row of the batch."""
        rows = Rows.at(torch.tensor([self.tokens - 1]), out.device)
        plan = AttendPlan.of(*(Part(request, rows, reaches) for request in range(len(out))))
        key, value = self.kv.key.double(), self.kv.value.double()
        kv = PagedKV(key, value, self.kv.table, self.kv.num_kv_heads)
        query = self.p.q.double().transpose(0, 1)
        truth = attend(query, kv, plan, scale=self.p.scale, impl="reference")
        return errors(out, truth.view_as(out))


def run(bench: Bench) -> None:
    """Every batch of the setting."""
    setting = bench.setting
    window = setting.windows[0]
    locals_ = setting.num_kv_heads - 1
    element = setting.dtype.itemsize
    for num_requests, tokens in setting.decodes:
        copies = [Inputs.of(setting, num_requests, tokens) for _ in range(COPIES)]
        seen = tokens + locals_ * min(tokens, window + setting.sink)
        num_bytes = num_requests * seen * 2 * setting.dim * element
        sinks = setting.reaches(window)
        windows = tuple(reach._replace(sink=0) for reach in sinks)
        dense = (Reach(),) * setting.num_kv_heads
        cases = [_case("triton", copies, sinks, Inputs.ours, num_bytes)]
        if not setting.tiny:
            cases += [
                _peer("fa3_dense_paged", copies, dense, peers.decode_fa3_dense),
                _peer("fa3_per_head", copies, windows, peers.decode_fa3_per_head),
                _peer("fa3_calls", copies, windows, peers.decode_fa3_calls),
            ]
        shape = f"requests={num_requests} tokens={tokens} window={window} page={setting.small_page}"
        bench.group("decode", shape, cases, launches=LAUNCHES, against=["triton"])
        del copies, cases


def _peer(
    name: str, copies: list[Inputs], reaches: tuple[Reach, ...], make: Callable[[Decode], Call]
) -> Case:
    return _case(name, copies, reaches, lambda inputs: make(inputs.p), 0)


def _case(
    name: str, copies: list[Inputs], reaches: tuple[Reach, ...],
    make: Callable[[Inputs], Call], num_bytes: int,
) -> Case:  # fmt: skip
    return Case(
        impl=name,
        make=partial(_all, make, copies),
        check=lambda copy, out: copies[copy].errors(out, reaches),
        kind="ours" if num_bytes else "peer",
        num_bytes=num_bytes,
        notes="tb_per_s counts visible K and V" if num_bytes else "pages of 128, no sinks",
    )


def _all(make: Callable[[Inputs], Call], copies: list[Inputs]) -> list[Call]:
    return [make(inputs) for inputs in copies]
