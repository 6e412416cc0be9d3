"""Checks and times groups of calls in turn and collects what came out."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .check import Errors
from .clock import Eager, Replays
from .peers import Call, PeerUnavailable
from .record import Kind, Record
from .setting import Setting

ROUNDS = 2
"All calls of a group once, then all again: what drifts, drifts for all."


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One implementation: how its calls are made (one for each copy of the inputs) and checked."""

    impl: str
    make: Callable[[], Sequence[Call]]
    check: Callable[[int, Tensor], Errors] | None = None
    "Of the output of the call for one copy; None: nothing to check."
    kind: Kind = "peer"
    num_bytes: int = 0  # read and written at least
    flops: int = 0
    notes: str = ""


class Bench:
    """All measurements of one process, until ``seconds`` are over."""

    def __init__(self, setting: Setting, seconds: float, budget: float) -> None:
        self.setting = setting
        self.records: list[Record] = []
        self._deadline = time.monotonic() + seconds
        self._seconds, self._budget = seconds, budget

    def group(
        self, op: str, shape: str, cases: Sequence[Case], *,
        launches: int = 0, against: Sequence[str] = (), rounds: int = ROUNDS,
    ) -> list[Record]:  # fmt: skip
        """Check each case, time them in turn; ratios to the fastest of ``against``.

        With ``launches``, graphs of so many calls. A case that fails is a record that says why.
        """
        found, clocks, times = {}, {}, {}
        for index, case in enumerate(cases):
            found[index] = self._checked(op, shape, case, launches, index, clocks)
        for _ in range(rounds):
            for index, clock in clocks.items():
                if found[index].notes.startswith("failed"):
                    continue
                try:
                    times.setdefault(index, []).extend(clock.samples(self._budget))
                except Exception as error:  # noqa: BLE001  a rival may fail in any way
                    found[index] = replace(found[index], notes=_reason("failed in timing", error))
        for index, samples in times.items():
            if not found[index].notes.startswith("failed"):
                found[index] = _timed(found[index], cases[index], clocks[index].how, samples)
        done = _with_ratios(list(found.values()), against)
        for record in done:
            self.add(record)
        clocks.clear()
        if self.setting.device.type == "cuda":
            torch.cuda.empty_cache()
        return done

    def add(self, record: Record) -> None:
        """Keep a record and show it."""
        self.records.append(record)
        median = f"{record.median_us:12.1f} us" if record.median_us is not None else " " * 15
        ratio = f"{record.ratio:7.3f} x {record.ratio_to}" if record.ratio is not None else ""
        error = f"error {record.error:.1e}" if record.error is not None else ""
        name = f"{record.op:13s} {record.shape:34s} {record.impl:28s}"
        print(f"{name} {median} {record.check:6s} {error} {ratio} {record.notes[:110]}", flush=True)

    def ceiling(self, impl: str) -> Record | None:
        """Measured copy or matrix product."""
        found = [r for r in self.records if r.op == "ceiling" and r.impl == impl and r.usable]
        return found[-1] if found else None

    def _checked(
        self, op: str, shape: str, case: Case, launches: int, index: int, clocks: dict[int, Eager]
    ) -> Record:
        record = Record(op=op, shape=shape, impl=case.impl, kind=case.kind, notes=case.notes)
        if time.monotonic() > self._deadline:
            return replace(record, notes=f"left out: {self._seconds:.0f} s were over")
        try:
            _poison(self.setting)
            calls = case.make()
            for copy, call in enumerate(calls):
                _poison(self.setting)
                out = call()
                if case.check is not None:
                    record = _judged(record, case.check(copy, out), self.setting.dtype)
            del out
            device = self.setting.device
            clocks[index] = Replays(calls, device, launches) if launches else Eager(calls, device)
        except PeerUnavailable as error:
            return replace(record, notes=f"not here: {error}")
        except Exception as error:  # noqa: BLE001  a rival may fail in any way
            return replace(record, check=_verdict(case), notes=_reason("failed", error))
        return record


def _verdict(case: Case) -> str:
    """Ours must run; a peer need not."""
    return "FAILED" if case.kind == "ours" else ""


def _judged(record: Record, found: Errors, dtype: torch.dtype) -> Record:
    """With the errors of one more copy; the first bad one stays."""
    if record.check == "FAILED":
        return record
    passed = found.passes(dtype)
    total, worst = found.total, found.worst
    if passed and record.error is not None:
        total, worst = max(total, record.error), max(worst, record.worst_error)
    return replace(record, error=total, worst_error=worst, check="ok" if passed else "FAILED")


def _timed(record: Record, case: Case, how: str, samples: list[float]) -> Record:
    low, median, high = samples[0], samples[0], samples[0]
    if len(samples) > 1:
        fifths = statistics.quantiles(samples, n=5, method="inclusive")
        low, median, high = fifths[0], statistics.median(samples), fifths[3]
    return replace(
        record, median_us=median, p20_us=low, p80_us=high, samples=len(samples), timing=how,
        tb_per_s=case.num_bytes / median / 1e6 if case.num_bytes else None,
        tflop_per_s=case.flops / median / 1e6 if case.flops else None,
    )  # fmt: skip


def _with_ratios(records: list[Record], against: Sequence[str]) -> list[Record]:
    known = [r for r in records if r.impl in against and r.usable]
    if not known:
        return records
    base = min(known, key=lambda r: r.median_us)
    return [
        r if r.median_us is None
        else replace(r, ratio=r.median_us / base.median_us, ratio_to=base.impl)
        for r in records
    ]  # fmt: skip


def _poison(setting: Setting) -> None:
    """Leave NaN where the allocator will put the next output."""
    if setting.device.type == "cuda":
        torch.full((2**30,), torch.nan, dtype=torch.bfloat16, device=setting.device)


def _reason(what: str, error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{what}: {type(error).__name__}: {text[:200]}"
