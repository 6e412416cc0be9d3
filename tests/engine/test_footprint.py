"""Pages counted before a request are what it really comes to hold, and hardly more."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from tests.engine.world import ROWS, World, prompt_of
from tests.execution.eager import lively_session, spanned
from tests.execution.test_masks import random_map
from tests.tiny import random_ids

from redknot.engine.footprint import Footprint, build_pages, tokens_that_fit
from redknot.execution import ExecutionSettings
from redknot.execution.batch import DecodeBatch
from redknot.execution.executor import Prefilled
from redknot.execution.session import Session
from redknot.heads import HeadMap
from redknot.recovery import Policy
from redknot.recovery.policies import Dense, Duo, QuestionDrop, RedKnot
from redknot.segments import Prompt
from redknot.segments.question import MAX_PROBE_TOKENS
from redknot.segpaged import OutOfPages, PagePool
from redknot.server.service import ROUNDING

POLICIES = [Dense(), Duo(windows="decode"), Duo(windows="all"), QuestionDrop(), RedKnot()]


def open_session(page_size: int, family: str = "llama", num_pages: int | None = None) -> Session:
    settings = ExecutionSettings(page_size=page_size, num_pages=num_pages)
    return lively_session(family, settings=settings)


class Peak:
    """The most pages that were held at once."""

    pages = 0


@contextmanager
def watched(pool: PagePool, monkeypatch: pytest.MonkeyPatch) -> Iterator[Peak]:
    """Counts from what is held now; looks whenever pages are taken."""
    peak, before, allocate = Peak(), pool.num_used, PagePool.allocate

    def allocated(self: PagePool, *args: object, **options: object) -> object:
        pages = allocate(self, *args, **options)  # type: ignore[arg-type]
        if self is pool:
            peak.pages = max(peak.pages, pool.num_used - before)
        return pages

    with monkeypatch.context() as patch:
        patch.setattr(PagePool, "allocate", allocated)
        yield peak


def with_early_probe(*lengths: int) -> Prompt:
    """The question stands before the segments."""
    whole = spanned(*lengths)
    spans = [(span.start, span.stop) for span in whole.spans]
    return Prompt.of_ids(whole.token_ids.tolist(), spans, probe=(1, 8))


def prefill(session: Session, prompt: Prompt, policy: Policy, head_map: HeadMap) -> Prefilled:
    """Nothing of it is kept for other prompts."""
    return session.executor.prefill(prompt.token_ids, session.look_up(prompt), policy, head_map)


def decode(session: Session, prefilled: Prefilled, new_tokens: int, choices: int) -> DecodeBatch:
    """As the engine does: the first token comes with the prompt, the last is never written."""
    batch = DecodeBatch(session.executor, choices, len(prefilled.token_ids) + new_tokens)
    for copy in [prefilled, *(prefilled.fork() for _ in range(choices - 1))]:
        batch.add(copy)
    for token in random_ids(new_tokens - 1, seed=3).tolist():
        batch.step([(token + choice) % 256 for choice in range(choices)])
    return batch


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.describe())
@pytest.mark.parametrize("page_size", [4, 64])
def test_prefill_holds_what_was_counted(
    policy: Policy, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the page where segments are known, since then a probe's copy is written as well."""
    session = open_session(page_size)
    pool, head_map = session.executor.storage.pool, random_map(session.model.hf, 1)
    for prompt in (spanned(40, 30), with_early_probe(60), with_early_probe(63), spanned()):
        counted = Footprint.of(session.executor, prompt, policy, head_map, 1, 1)
        for known in (False, True):
            if known:
                session.build_missing(prompt)
            with watched(pool, monkeypatch) as peak:
                prefilled = prefill(session, prompt, policy, head_map)
            assert peak.pages <= counted.prefill
            if known or not policy.uses_probe:
                assert peak.pages == counted.prefill
            assert len(prefilled.cache.held) == pool.num_used
            prefilled.cache.release()


@pytest.mark.parametrize("family", ["llama", "qwen2-mixed"])
@pytest.mark.parametrize("policy", POLICIES[:3], ids=lambda policy: policy.describe())
@pytest.mark.parametrize(("page_size", "new_tokens"), [(4, 41), (16, 1), (16, 50)])
def test_the_last_tokens_come_within_what_was_counted(
    family: str,
    policy: Policy,
    page_size: int,
    new_tokens: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For one choice it is right within a page for each (layer, group) that has grown twice."""
    session = open_session(page_size, family)
    pool, rows = session.executor.storage.pool, sum(s.num_groups for s in session.executor.shapes)
    prompt = spanned(70, 45)
    for seed, choices in ((1, 1), (2, 1), (3, 3)):
        head_map = random_map(session.model.hf, seed)
        counted = Footprint.of(session.executor, prompt, policy, head_map, new_tokens, choices)
        prefilled = prefill(session, prompt, policy, head_map)
        held = len(prefilled.retain().cache.held)
        assert held == pool.num_used
        with watched(pool, monkeypatch) as peak:
            batch = decode(session, prefilled, new_tokens, choices)
        most = held + peak.pages - 1  # 1: the page of idle slots
        assert most <= counted.last
        if choices == 1 and family == "llama":  # a model's own window hides sinks, too
            assert most >= counted.last - rows * (1 if new_tokens > 2 * page_size else 2)
        for number in reversed(range(choices)):
            batch.remove(number).cache.release()
        del batch
        assert pool.num_used == 0


@pytest.mark.parametrize("choices", [1, 2, 3])
@pytest.mark.parametrize("policy", POLICIES[:3], ids=lambda policy: policy.describe())
def test_a_pool_of_that_size_is_enough_and_a_smaller_one_is_not(
    policy: Policy, choices: int
) -> None:
    prompt, new_tokens = spanned(70, 45), 30
    loose = open_session(4)
    rows = sum(shape.num_groups for shape in loose.executor.shapes)
    head_map = random_map(loose.model.hf, 5)
    counted = Footprint.of(loose.executor, prompt, policy, head_map, new_tokens, choices)
    most = max(counted.prefill, counted.last)
    session = open_session(4, num_pages=most + 1)  # 1: the page of idle slots
    prefilled = prefill(session, prompt, policy, head_map)
    batch = decode(session, prefilled, new_tokens, choices)
    assert len(batch.requests) == choices
    session.executor.storage.pool.check()
    small = open_session(4, num_pages=most - 2 * rows * choices)
    with pytest.raises(OutOfPages):
        decode(small, prefill(small, prompt, policy, head_map), new_tokens, choices)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_as_many_tokens_as_fit_do_fit_and_a_page_more_does_not(page_size: int) -> None:
    session = open_session(page_size, num_pages=8 * 13 + 5)
    tokens = tokens_that_fit(session.executor, probe_tokens=0)
    assert tokens == 13 * page_size
    assert tokens_that_fit(session.executor, probe_tokens=3) == tokens - 3
    assert tokens_that_fit(session.executor, probe_tokens=10_000) == 0
    limit = session.executor.storage.pool.num_pages - 1
    policy, whole = Dense(), Prompt.of_ids([256] * tokens, [])
    assert Footprint.of(session.executor, whole, policy, None, 0, 1).prefill <= limit
    more = Prompt.of_ids([256] * (tokens + 1), [])
    assert Footprint.of(session.executor, more, policy, None, 0, 1).prefill > limit


@pytest.mark.parametrize("tokens", [1, 15, 16, 33])
def test_building_holds_what_was_counted(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    session = open_session(16)
    anchor = len(session.namespace.anchor)
    with watched(session.executor.storage.pool, monkeypatch) as peak:
        session.build(torch.arange(tokens))
    assert peak.pages == build_pages(session.executor, tokens + anchor)
    assert session.executor.storage.pool.num_used == 0


@pytest.mark.parametrize("n", [2, 3, 5, 8, 16])
@pytest.mark.parametrize("tokens", [1, 16, 500])
def test_choices_that_share_what_there_is_are_taken(n: int, tokens: int) -> None:
    """As the server shares it out where no length was asked for."""
    world = World(num_pages=1 + ROWS * 150, max_requests=16)
    prompt = prompt_of(question=tokens)
    room = tokens_that_fit(world.session.executor, MAX_PROBE_TOKENS)
    share = (room - len(prompt)) // n - ROUNDING
    most = world.engine.intake.context_length - len(prompt)
    assert isinstance(world.offer(prompt, n=n, max_tokens=max(1, min(share, most))), str)
