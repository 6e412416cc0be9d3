"""Requests that take turns layer by layer compute what they compute alone."""

import gc
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.execution.eager import lively_session, spanned
from tests.execution.test_masks import random_map
from tests.tiny import random_ids

from redknot.execution import ExecutionSettings
from redknot.execution import clock as module
from redknot.execution.clock import Clock
from redknot.execution.executor import Prefilled
from redknot.execution.layer import finish
from redknot.execution.session import Session
from redknot.execution.turns import Turns, drained
from redknot.recovery import Policy
from redknot.recovery.policies import CacheBlend, Dense, Duo, Prefix, QuestionDrop, RedKnot, Reuse
from redknot.segments import Prompt

POLICIES: list[Policy] = [
    Dense(),
    Prefix(windows="all"),
    Reuse(),
    Duo(),
    QuestionDrop(windows="all"),
    CacheBlend(),
    RedKnot(dense_until=1, mass=0.3, recent=4),
]
PROMPTS = [spanned(40, 33), spanned(61, 20, question=12, seed=1), spanned(question=50, seed=2)]


@pytest.fixture(autouse=True, scope="module")
def _copied() -> Iterator[None]:
    """Pages that stand in order are read without a copy, which rounds otherwise: here none are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("redknot.kernels.paging._stride", lambda pages: None)
        yield
    opened.cache_clear()
    alone.cache_clear()


policies = st.sampled_from(range(len(POLICIES)))
prompts = st.sampled_from(range(len(PROMPTS)))
requests = st.tuples(policies, prompts)


@cache
def opened(chunk_tokens: int | None) -> Session:
    """With the first prompt's segments stored, and a beginning that the first two share."""
    session = lively_session(settings=ExecutionSettings(chunk_tokens=chunk_tokens))
    session.build_missing(PROMPTS[0])
    session.prefill(Prompt.of_ids(PROMPTS[0].token_ids[:20].tolist(), []), Prefix())
    return session


def prefilling(
    session: Session, policy: Policy, prompt: Prompt, clock: Clock | None = None
) -> Turns[Prefilled]:
    known = session.look_up(prompt)
    return session.executor.prefilling(
        prompt.token_ids,
        known,
        policy,
        random_map(session.model.hf, 1),
        beginning=known.beginning and known.beginning.cache,
        clock=clock,
    )


@cache
def alone(chunk_tokens: int | None, policy: int, prompt: int) -> Prefilled:
    return drained(prefilling(opened(chunk_tokens), POLICIES[policy], PROMPTS[prompt]))


def together(works: list[Turns[Any]], order: Iterator[int]) -> list[Any]:
    """What each returns; whose turn it is comes from ``order``, while there are several."""
    left, results = list(range(len(works))), [None] * len(works)
    while left:
        mine = left[next(order, 0) % len(left)]
        try:
            assert next(works[mine]) >= 0
        except StopIteration as end:
            results[mine] = end.value
            left.remove(mine)
    return results


def assert_same(got: Prefilled, wanted: Prefilled) -> None:
    assert torch.equal(got.logits, wanted.logits)
    assert torch.equal(got.cache.table >= 0, wanted.cache.table >= 0)
    for layer, groups in enumerate(wanted.cache.table >= 0):
        positions = torch.arange(wanted.cache.length)
        there = groups[:, positions // wanted.cache.storage.page_size]
        states = got.cache.read(layer, positions), wanted.cache.read(layer, positions)
        assert all(torch.equal(x[there], y[there]) for x, y in zip(*states, strict=True))
    assert [one.active.tolist() for one in got.plan.layers] == [
        one.active.tolist() for one in wanted.plan.layers
    ]


@given(st.lists(requests, min_size=2, max_size=3), st.lists(st.integers(0, 2), max_size=40),
       st.sampled_from([None, 16]))  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_prefills_that_take_turns_give_the_bits_of_each_alone(
    asked: list[tuple[int, int]], order: list[int], chunk_tokens: int | None
) -> None:
    session = opened(chunk_tokens)
    works = [prefilling(session, POLICIES[policy], PROMPTS[prompt]) for policy, prompt in asked]
    for request, got in zip(asked, together(works, iter(order)), strict=True):
        assert_same(got, alone(chunk_tokens, *request))


@given(policies, st.lists(st.integers(0, 1), max_size=12))
@settings(max_examples=20, deadline=None)
def test_a_segment_that_is_built_between_turns_disturbs_nobody(
    policy: int, order: list[int]
) -> None:
    session, text = opened(None), random_ids(50, seed=11)
    session.store.delete(session.key(text))
    wanted = lively_session().build(text)
    works = [session.building(text), prefilling(session, POLICIES[policy], PROMPTS[0])]
    state, prefilled = together(works, iter(order))
    assert_same(prefilled, alone(None, policy, 0))
    for name, plane in wanted.planes.items():
        assert torch.equal(state.planes[name], plane)
    assert session.store.get(session.key(text)) is not None


@pytest.mark.parametrize("chunk_tokens", [None, 16])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.describe())
def test_an_abandoned_prefill_gives_all_pages_back(
    policy: Policy, chunk_tokens: int | None
) -> None:
    """After any number of turns, without the collector."""
    session = opened(chunk_tokens)
    gc.collect()
    pool = session.executor.storage.pool
    before, most = pool.num_used, 0
    steps = sum(1 for _ in prefilling(session, policy, PROMPTS[0]))
    assert steps >= len(session.model.adapter.layers)
    gc.disable()
    try:
        for step in range(steps + 1):
            work = prefilling(session, policy, PROMPTS[0])
            for _ in range(step):
                next(work)
            most = max(most, pool.num_used)
            work.close()
            assert pool.num_used == before, f"after {step} of {steps} turns"
    finally:
        gc.enable()
    assert most > before


@pytest.mark.parametrize("step", range(5))
def test_an_abandoned_building_gives_all_pages_back_and_stores_nothing(step: int) -> None:
    session, text = lively_session(), random_ids(50, seed=11)
    work = session.building(text)
    for _ in range(step):
        next(work)
    work.close()
    assert session.executor.storage.pool.num_used == 0
    assert session.store.get(session.key(text)) is None


OTHERS, OWN = 1000.0, 100.0
"Seconds of somebody else's turn and of one's own layer; reading the clock takes one second."


class Now:
    """The host's clock."""

    seconds = 0.0

    def read(self) -> float:
        self.seconds += 1
        return self.seconds


@pytest.mark.parametrize("takes_turns", [False, True])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.describe())
def test_what_others_do_between_two_turns_is_charged_to_wait(
    policy: Policy, takes_turns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, now = opened(None), Now()
    monkeypatch.setattr(module.time, "perf_counter", now.read)
    clock = Clock(torch.device("cpu"), takes_turns=takes_turns)
    pauses = layers = 0

    def slow(*arguments: Any) -> torch.Tensor:
        nonlocal layers
        layers += 1
        now.seconds += OWN
        return finish(*arguments)

    monkeypatch.setattr("redknot.execution.recover.finish", slow)
    for _ in (work := prefilling(session, policy, PROMPTS[0], clock)):
        now.seconds += OTHERS
        pauses += 1
    assert work.gi_frame is None
    seconds = clock.seconds
    assert pauses >= 4
    if takes_turns:
        wait = seconds.pop("wait")
        assert OTHERS * pauses <= wait < OTHERS * pauses + OWN
        assert OWN * layers <= seconds.pop("recover") < OWN * (layers + 1)
        assert sum(seconds.values()) < OWN
    else:
        assert "wait" not in seconds
        assert seconds["recover"] >= OWN * layers + OTHERS * (layers - 1)
        assert sum(seconds.values()) >= OWN * layers + OTHERS * pauses
    assert "relocate" in seconds


def test_time_in_the_queue_before_the_first_turn_is_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    session, now = opened(None), Now()
    monkeypatch.setattr(module.time, "perf_counter", now.read)
    clock = Clock(torch.device("cpu"), takes_turns=True)
    work = prefilling(session, Dense(), PROMPTS[0], clock)
    now.seconds += OTHERS
    drained(work)
    assert OTHERS <= clock.seconds["wait"] < 2 * OTHERS
