"""Bytes held are what rows still to come may see, rounded to pages: read from the allocator."""

import pytest
import torch
from tests.execution.eager import lively_hf, spanned
from tests.execution.test_masks import open_session, random_map
from tests.tiny import random_ids

from redknot.execution import ExecutionSettings, PromptCache, Visibility
from redknot.execution.session import Session
from redknot.heads import HeadMap
from redknot.kernels.attend.reference import visible
from redknot.models.byte_tokenizer import byte_tokenizer
from redknot.models.loading import wrap_model
from redknot.recovery.policies import Duo
from redknot.segpaged import Retention

STEPS = 1000


def open_paged(page_size: int, chunk_tokens: int | None = None) -> Session:
    settings = ExecutionSettings(chunk_tokens=chunk_tokens, page_size=page_size)
    return Session(wrap_model(lively_hf(), byte_tokenizer(add_bos=True)), settings=settings)


def pages_seen(sight: Visibility, position: int, length: int, size: int, last: int) -> int:
    """Pages of all groups that a row from ``position`` to ``last`` sees, and the one in work."""
    context = torch.arange(position, max(position, sight.border))
    later = torch.arange(max(position, sight.border), last)
    filling = [(length - 1) // size] if length % size else []
    count = 0
    for prefill, decode in zip(sight.prefill, sight.decode, strict=True):
        for early, late in zip(prefill, decode, strict=True):
            seen = visible(context, length, early).any(0) | visible(later, length, late).any(0)
            pages = {index // size for index in seen.nonzero().flatten().tolist()}
            count += len(pages | set(filling))
    return count


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("chunk_tokens", [7, 64, None])
def test_held_bytes_are_what_will_be_seen_at_every_step(
    chunk_tokens: int | None, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, prompt = open_paged(page_size, chunk_tokens), spanned(150, 90)
    head_map = random_map(session.model.hf, 4)
    executor, seen = session.executor, []
    storage = executor.storage
    evict = PromptCache.evict

    def watched(
        cache: PromptCache, retention: Retention | None = None, position: int | None = None
    ) -> None:
        evict(cache, retention, position)
        held = storage.num_bytes_used // storage.page_bytes
        seen.append((cache.length if position is None else position, cache.length, held))

    monkeypatch.setattr(PromptCache, "evict", watched)
    prefilled = session.prefill(prompt, Duo(windows="all"), head_map)
    prefilled.retain()
    for token in random_ids(20, seed=1):
        executor.extend(prefilled, token[None])
    chunks = 0 if chunk_tokens is None else -(-len(prompt) // chunk_tokens)
    assert len(seen) == chunks + 1 + 20  # each chunk, the end of the prompt, each step
    for position, length, held in seen:
        end = len(prompt) + 600
        assert held == pages_seen(prefilled.sight, position, length, page_size, end)
        storage.pool.check()
    assert prefilled.cache.num_bytes == storage.num_bytes_used


def test_a_thousand_decode_steps_hold_what_a_window_needs() -> None:
    session, prompt = open_paged(16), spanned(70)
    scores = torch.arange(8.0).view(4, 2)
    head_map = HeadMap.from_scores(scores, global_share=0.25, window=40, sink=4)
    prefilled = session.prefill(prompt, Duo(windows="decode"), head_map).retain()
    storage = session.executor.storage
    for step, token in enumerate(random_ids(STEPS, seed=2)):
        session.executor.extend(prefilled, token[None])
        length = len(prompt) + step + 1
        whole = -(-length // 16)
        window = whole - max(1, (length - 39) // 16)  # page 0 has the sinks
        assert storage.pool.num_used == 2 * whole + 6 * (1 + window)
    assert prefilled.cache.length == len(prompt) + STEPS


def test_everything_goes_back_when_a_prompt_is_dropped() -> None:
    hf = lively_hf()
    session = open_session(hf)
    executor = session.executor
    prefilled = [session.prefill(spanned(60, 50), Duo(), random_map(hf, seed)) for seed in (1, 2)]
    forked = prefilled[0].fork()
    assert executor.storage.pool.num_used > 0
    del prefilled
    session.beginnings.forget()
    assert executor.storage.num_bytes_used == forked.cache.num_bytes
    del forked
    assert executor.storage.pool.num_used == 0
    executor.storage.pool.check([])


def test_a_prompt_is_read_right_after_another_made_the_storage_grow() -> None:
    """The planes are new then; views of the old ones must not be used again."""
    session, prompt = open_paged(16), spanned(40)
    alone = open_paged(16)
    head_map = random_map(session.model.hf, 1)
    first = session.prefill(prompt, Duo(), head_map)
    session.executor.extend(first, random_ids(1, seed=5))
    second = session.prefill(spanned(300), Duo(), head_map)
    twin = alone.prefill(prompt, Duo(), head_map)
    alone.executor.extend(twin, random_ids(1, seed=5))
    for token in random_ids(40, seed=6):  # over a page's border and beyond
        grown = session.executor.extend(first, token[None])
        assert torch.equal(grown, alone.executor.extend(twin, token[None]))
    assert second.cache.length == len(spanned(300))
