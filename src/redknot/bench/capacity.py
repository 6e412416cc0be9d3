"""How many requests a pool holds at once: prefilled one by one until none fits, then decoded."""

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from statistics import median

import msgspec
import torch

from redknot.bench.context import Bench
from redknot.bench.machine import layer_factor
from redknot.bench.prompts import PromptShape, Request, Tokens
from redknot.bench.records import CapacityRow, Spread
from redknot.bench.room import SHORT_OF_MEMORY, pages_of, release
from redknot.bench.setting import Setting
from redknot.bench.steps import FIRST_STEPS, Stepper
from redknot.bench.timed import Runner
from redknot.errors import InputError
from redknot.execution import Prefilled
from redknot.execution.batch import DecodeBatch
from redknot.recovery import Policy, Windows
from redknot.segpaged import OutOfPages

NOTE = (
    "all requests, those of dense K/V too, are prefilled by the same policy, so that prefills take"
    " little time; the segments of one prompt are shared: each request has them in another order"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class CapacitySettings:
    """How the pool is made and filled."""

    prefill_policy: str = "question_drop:first=0.4:then=0.2:windows=all"
    "Its windows must hold while decoding."
    new_tokens: int = 64
    "That all residents decode together; the first steps are timed apart."
    segment_tokens: int = 2048
    reserve_gib: float = 8.0
    "Of device memory: for activations, graphs and, if they are there, segments."
    pool_gib: float | None = None
    "The pool itself; None takes all but the reserve."
    host_segments: bool = True
    "Segments wait in host memory, page-locked on a GPU."

    def __post_init__(self) -> None:
        if self.new_tokens <= FIRST_STEPS:
            raise InputError(f"{self.new_tokens} new tokens: {FIRST_STEPS + 1} is the least")


def capacity_settings(policy: Policy, shares: Sequence[float]) -> list[Setting]:
    """Dense K/V, and windowed K/V under a map of each share."""
    if not policy.windows.on_decode:
        raise InputError(f"{policy.describe()}: windows must be decode or all to save any page")
    dense = Setting(replace(policy, windows=Windows.NONE))
    return [dense, *(Setting(policy, share) for share in shares)]


@dataclass(frozen=True, slots=True, eq=False)
class Resident:
    """A prefilled request without what it no longer sees, and its first token."""

    prefilled: Prefilled
    token: int
    seconds: float
    "Of its prefill."


class Admission:
    """Takes in requests while their prompt fits and all may still grow."""

    def __init__(self, bench: Bench, runner: Runner, tokens: int, new_tokens: int) -> None:
        self._runner, self._pool = runner, bench.session.executor.storage.pool
        executor = bench.session.executor
        self._growth = pages_of(executor, tokens + new_tokens) - pages_of(executor, tokens)
        self.residents: list[Resident] = []
        self.stopped_by = ""

    def fill(self, requests: Iterator[Request]) -> None:
        """Until the next one is refused; `RuntimeError` if it kept pages."""
        while not self.stopped_by:
            held = self._pool.num_used
            self._admit(next(requests))
            self._runner.session.forget(segments=False)
        gc.collect()
        if self._pool.num_used != held:
            raise RuntimeError(f"a refused request kept {self._pool.num_used - held} pages")

    def _admit(self, request: Request) -> None:
        try:
            timed = self._runner.run(request)
        except OutOfPages as error:
            self.stopped_by = f"prefill: {error}"
            return
        prefilled = timed.prefilled.retain()
        growth = self._growth * (len(self.residents) + 1) + 1  # 1: the page of idle slots
        if growth > self._pool.num_free:
            self.stopped_by = f"new tokens: {growth} pages, {self._pool.num_free} are free"
            return
        self.residents.append(Resident(prefilled, timed.token, timed.seconds))


def capacity(
    bench: Bench, shape: PromptShape, settings: Sequence[Setting], new_tokens: int
) -> Iterator[CapacityRow]:
    """A row for each setting, the first of them dense K/V; the segments must be stored.

    ``new_tokens`` includes the first steps, which are timed apart.
    """
    segments = Tokens(bench.session, bench.maps.seed).request(shape).segments()
    dense: CapacityRow | None = None
    for setting in settings:
        tokens = Tokens(bench.session, bench.maps.seed + 1)
        requests = (tokens.around(segments, shape) for _ in repeat(None))
        if bench.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(bench.device)
        row = CapacityRow(name=setting.label, share=setting.share)
        try:
            row = _filled(bench, setting, requests, shape.tokens, new_tokens)
        except SHORT_OF_MEMORY as error:
            row = msgspec.structs.replace(row, skipped=str(error).splitlines()[0])
        bench.session.forget(segments=False)
        release(bench.device)
        left = bench.session.executor.storage.pool.num_used
        row = msgspec.structs.replace(row, pages_left=left)
        dense = dense or row
        yield beside(row, dense)


def _filled(
    bench: Bench, setting: Setting, requests: Iterator[Request], tokens: int, new_tokens: int
) -> CapacityRow:
    """Fill the pool and decode; nothing holds a page when this returns."""
    executor, layers = bench.session.executor, layer_factor(bench.session.model)
    admission = Admission(bench, bench.runner(setting), tokens, new_tokens)
    admission.fill(requests)
    residents, pool = admission.residents, executor.storage.pool
    row = CapacityRow(
        name=setting.label,
        share=setting.share,
        residents=len(residents),
        stopped_by=admission.stopped_by,
        pages_in_use=pool.num_used,
    )
    if not residents:
        return row
    each = int(median(one.prefilled.cache.num_bytes for one in residents))
    batch = DecodeBatch(executor, len(residents), tokens + new_tokens)
    for one in residents:
        batch.add(one.prefilled)
    stepper = Stepper(batch, [one.token for one in residents])
    for _ in range(new_tokens):
        stepper.step()
    gpu = bench.device.type == "cuda"
    return msgspec.structs.replace(
        row,
        pages_each=each // executor.storage.page_bytes,
        prefill_seconds=Spread.of([one.seconds for one in residents]),
        first_steps_seconds=stepper.first_seconds,
        step_seconds=stepper.spread,
        tokens_per_second=stepper.tokens_per_second,
        extrapolated_step_seconds=None if layers is None else stepper.spread.median * layers,
        peak_bytes=torch.cuda.max_memory_allocated(bench.device) if gpu else None,
    )


def beside(row: CapacityRow, dense: CapacityRow) -> CapacityRow:
    """The same with its ratios to dense K/V."""
    rate, dense_rate = row.tokens_per_second, dense.tokens_per_second
    if rate is None or dense_rate is None:
        return row
    return msgspec.structs.replace(
        row,
        residents_ratio=row.residents / dense.residents,
        tokens_per_second_ratio=rate / dense_rate,
    )
