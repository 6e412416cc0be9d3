"""The FFN of a fifth of the rows, gathered, beside the same FFN on contiguous rows."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from redknot.kernels.gather_ffn import gather_ffn

from .bench import Bench, Case
from .check import NUM_ROWS, Errors, errors
from .setting import Setting

SHARE = 0.2


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """A gated FFN; its output is small, so that repeated calls in place stay finite."""

    gate: Tensor  # [inner, hidden]
    up: Tensor
    down: Tensor

    @classmethod
    def of(cls, setting: Setting) -> "Weights":
        """Random ones."""
        _, hidden, inner = setting.ffn
        gate, up = (setting.random(inner, hidden) * 0.7 * hidden**-0.5 for _ in range(2))
        return cls(gate, up, setting.random(hidden, inner) * 0.16 * inner**-0.5)

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = (F.linear(x, weight.to(x.dtype)) for weight in (self.gate, self.up))
        return F.linear(F.silu(gate) * up, self.down.to(x.dtype))


def run(bench: Bench) -> None:
    """At the shape of the setting."""
    setting = bench.setting
    rows, hidden, inner = setting.ffn
    weights = Weights.of(setting)
    before = setting.random(rows, hidden)
    state = before.clone()
    index = torch.randperm(rows, device=setting.device)[: int(rows * SHARE)].sort().values
    some = before[index]
    untouched = torch.ones(rows, dtype=torch.bool, device=setting.device)
    untouched[index] = False

    def check(out: Tensor, rows_before: Tensor) -> Errors:
        at = torch.randperm(len(rows_before), device=out.device)[:NUM_ROWS]
        x = rows_before[at].double()
        return errors(out[at], x + weights(x))

    def check_gathered(out: Tensor) -> Errors:
        if not torch.equal(out[untouched], before[untouched]):
            return Errors(torch.nan, torch.nan)
        return check(out[index], some)

    flops = 6 * hidden * inner
    cases = [
        Case(
            impl="gather_ffn",
            make=lambda: [lambda: gather_ffn(state, weights, index)],
            check=lambda _, out: check_gathered(out),
            kind="ours",
            flops=flops * len(index),
        ),
        Case(
            impl="contiguous rows",
            make=lambda: [lambda: some + weights(some)],
            check=lambda _, out: check(out, some),
            flops=flops * len(index),
        ),
        Case(
            impl="all rows",
            make=lambda: [lambda: before + weights(before)],
            check=lambda _, out: check(out, before),
            flops=flops * rows,
        ),
    ]
    shape = f"rows={len(index)} of={rows} hidden={hidden} inner={inner}"
    bench.group("gather_ffn", shape, cases, against=["contiguous rows"])
