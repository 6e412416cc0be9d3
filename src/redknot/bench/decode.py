"""Steps of decoding over random K/V: every head global, and head classes, by turns."""

from collections.abc import Iterator, Sequence

import msgspec
import torch

from redknot.bench.context import Bench
from redknot.bench.machine import layer_factor
from redknot.bench.records import DecodeRow
from redknot.bench.room import SHORT_OF_MEMORY, make_pages, pages_of, release, rows_of
from redknot.bench.setting import DENSE, Setting, later_rows
from redknot.bench.steps import FIRST_STEPS, Stepper
from redknot.errors import InputError
from redknot.execution import Executor, Prefilled, PromptCache, Visibility
from redknot.execution.batch import DecodeBatch
from redknot.execution.clock import Clock
from redknot.execution.recover import Executed
from redknot.heads import retained_share
from redknot.recovery import Layout

NOTE = "K/V are random: no prompt was prefilled"
NOISE_PAGES = 4096  # filled at a time


def decode_settings(shares: Sequence[float]) -> list[Setting]:
    """Dense, and dense prefills whose later rows obey a map of each share."""
    return [DENSE, *map(later_rows, shares)]


def decode(
    bench: Bench, tokens: int, settings: Sequence[Setting], batches: Sequence[int], steps: int
) -> Iterator[DecodeRow]:
    """Rows of each batch size; where memory does not suffice they say so."""
    for count in batches:
        try:
            rows = _at(bench, tokens, settings, count, steps)
        except SHORT_OF_MEMORY as error:
            reason = str(error).splitlines()[0]
            rows = [
                DecodeRow(name=one.label, share=one.share, batch=count, skipped=reason)
                for one in settings
            ]
        release(bench.device)
        yield from rows


def check_length(bench: Bench, tokens: int, steps: int) -> None:
    """`InputError` unless the requests fit the model's context to the end."""
    limit, total = bench.session.model.adapter.context_length, tokens + FIRST_STEPS + steps
    if tokens < 1 or total > limit:
        raise InputError(f"{tokens} tokens and all steps are {total}; the context holds {limit}")


def random_prompt(bench: Bench, setting: Setting, cache: PromptCache) -> Prefilled:
    """What decoding needs to know of a prompt whose K/V nobody has computed."""
    executor, tokens = bench.session.executor, cache.length
    layout = Layout(
        num_tokens=tokens, exact=0, segments=(), context_end=tokens, probe=(tokens - 1, tokens)
    )
    head_map, windows = bench.head_map(setting.share), setting.policy.windows
    return Prefilled(
        token_ids=torch.zeros(tokens, dtype=torch.int64),
        cache=cache,
        sight=Visibility.of(executor.shapes, tokens, head_map, windows),
        logits=torch.zeros(0),
        executed=Executed("random K/V", tokens, 0),
        layout=layout,
        known=layout,
        shapes=executor.shapes,
        clock=Clock(bench.device),
    )


def _at(
    bench: Bench, tokens: int, settings: Sequence[Setting], count: int, steps: int
) -> list[DecodeRow]:
    """All settings over the same K/V, of which each gives back what it does not see."""
    executor, total = bench.session.executor, FIRST_STEPS + steps
    make_pages(bench.session, _pages(executor, tokens, total, count, len(settings)))
    _fill_with_noise(executor)
    caches = [
        PromptCache.allocate(executor.adapter, tokens, executor.storage) for _ in range(count)
    ]
    steppers, rows = [], []
    for setting in settings:
        batch = DecodeBatch(executor, count, tokens + total)
        for cache in caches:
            batch.add(random_prompt(bench, setting, cache.fork()))
        steppers.append(Stepper(batch, [0] * count))
        first = batch.requests[0]
        rows.append(
            DecodeRow(
                name=setting.label,
                share=setting.share,
                batch=count,
                kv_share=retained_share(tokens, list(first.sight.decode)),
                kv_bytes=first.cache.num_bytes,
            )
        )
    for _ in range(total):
        for stepper in steppers:
            stepper.step()
    dense, layers = steppers[0].spread.median, layer_factor(bench.session.model)
    return [
        msgspec.structs.replace(
            row,
            first_steps_seconds=stepper.first_seconds,
            step_seconds=stepper.spread,
            tokens_per_second=stepper.tokens_per_second,
            extrapolated_step_seconds=None if layers is None else stepper.spread.median * layers,
            speed_up=dense / stepper.spread.median,
        )
        for row, stepper in zip(rows, steppers, strict=True)
    ]


def _pages(executor: Executor, tokens: int, new: int, count: int, settings: int) -> int:
    """Of the shared K/V; of what each setting appends, its copy of a shared last page included;
    and of the idle slots of each batch."""
    shared = rows_of(executor) * (tokens // executor.storage.page_size)
    own = pages_of(executor, tokens + new) - shared
    return count * (pages_of(executor, tokens) + settings * own) + settings


def _fill_with_noise(executor: Executor) -> None:
    """Normal K/V in every page."""
    for plane in executor.storage.planes.values():
        for pages in plane.split(NOISE_PAGES):
            pages.normal_()
