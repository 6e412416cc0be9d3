"""Company changes nothing, cancelling leaves nothing, a fault stays with its request."""

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.world import World, assert_same, prompt_of, segments
from tests.execution.eager import lively_hf
from tests.execution.test_masks import random_map

from redknot.engine.messages import Cancel
from redknot.execution.batch import DecodeBatch
from redknot.recovery.policies import Reuse
from redknot.recovery.policy import Stage
from redknot.segments import MemoryStore, Prompt

A, B, C, D = segments(60, 40, 33, 100)
POLICIES = [
    "dense",
    "prefix",
    "reuse",
    "epic:k=8",
    "question_drop",
    "question:share=0.3:windows=decode",
    "duo:windows=all",
    "redknot:dense_until=1:recent=8",
    "cacheblend",
]


def warm_store() -> MemoryStore:
    """With the state of A, B and D."""
    world = World()
    world.build(A, B, D)
    store = world.session.store
    assert isinstance(store, MemoryStore)
    return store


STORE = warm_store()


def guests(seed: int) -> list[tuple[Prompt, dict[str, Any]]]:
    """Requests whose prompts begin differently behind BOS, so that none finds another's pages."""
    draw, found = random.Random(seed), []
    for number in range(10):
        parts = draw.sample([A, B, C, D], draw.randint(0, 3))
        first = draw.random() < 0.3
        prompt = prompt_of(*parts, lead=17 * number + 1, question=draw.randint(1, 40), first=first)
        options: dict[str, Any] = {
            "policy": draw.choice(POLICIES),
            "max_tokens": draw.choice([1, 2, 7, 20, 40]),
            "n": draw.choice([1, 1, 2, 3]),
            "exact": draw.random() < 0.15,
            "logprobs": 2,
        }
        if draw.random() < 0.4:
            options |= {"temperature": 0.8, "top_p": 0.9, "seed": draw.randrange(1000)}
        found.append((prompt, options))
    return found


@pytest.mark.parametrize("seed", range(4))
def test_everybody_gets_in_company_what_they_get_alone(seed: int) -> None:
    hf = lively_hf()
    head_map = random_map(hf, seed)
    draw, offered = random.Random(seed), guests(seed)
    busy = World(hf=hf, head_map=head_map, store=STORE, step_ms=draw.choice([0.01, 3.0, 60.0]))
    waiting = list(range(len(offered)))
    draw.shuffle(waiting)
    ids = {}
    while waiting:
        if draw.random() < 0.4:
            number = waiting.pop()
            ids[number] = busy.submit(offered[number][0], **offered[number][1])
        busy.turn()
    busy.run()
    for number, (prompt, options) in enumerate(offered):
        alone = World(hf=hf, head_map=head_map, store=STORE)
        wanted, got = alone.ask(prompt, **options), busy.answers[ids[number]]
        assert got.reasons == wanted.reasons == ["length"] * options["n"]
        assert got.told.policy == wanted.told.policy
        bos = wanted.told.recomputed_tokens - got.told.recomputed_tokens
        assert bos in (0, 1), "all that prompts share"
        for choice in range(options["n"]):
            assert len(got.ids(choice)) == options["max_tokens"]
            assert_same(hf, prompt, got.tokens[choice], wanted.tokens[choice])
    busy.assert_empty()


def test_short_ones_are_not_held_up_by_a_long_one() -> None:
    world = World(step_ms=0.001, max_requests=4)
    long = world.submit(prompt_of(*segments(200, 200, seed=3)))
    world.turn()
    short = world.submit(prompt_of(lead=5), arrived=1.0)
    world.run()
    assert world.answers[short].first_turn < world.answers[long].first_turn


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    turns=st.integers(0, 30),
    choice=st.sampled_from([None, 0, 1, 2]),
    policy=st.sampled_from(["dense", "prefix", "question_drop", "duo:windows=all", "redknot"]),
    seed=st.integers(0, 3),
)
def test_cancelling_frees_pages_at_once_and_touches_nobody(
    turns: int, choice: int | None, policy: str, seed: int
) -> None:
    hf = lively_hf()
    options: dict[str, Any] = {"max_tokens": 9, "logprobs": 2}
    world = World(hf=hf, head_map=random_map(hf, seed), store=STORE, step_ms=0.001)
    other = prompt_of(B, lead=3, question=20)
    stays = world.submit(other, policy="reuse", **options)
    goes = world.submit(prompt_of(A, D, lead=9, question=5), policy=policy, n=3, **options)
    for _ in range(turns):
        world.turn()
    answer = world.answers[goes]
    before = answer.all_ids
    was_done = answer.done
    world.engine.cancel(Cancel(request_id=goes, choice=choice))
    if choice is None:
        assert goes not in world.engine.requests
        world.session.beginnings.forget()
        held = world.engine.held_pages()
        rest = world.engine.company.prefilled()
        exactly = sum(len(prefilled.cache.held) for prefilled in rest)
        if stays in world.engine.requests and world.answers[stays].report is None:
            assert world.pool.num_used <= 1 + held
        else:
            assert world.pool.num_used == 1 + exactly
    world.run()
    gone = range(3) if choice is None else [choice]
    for number in range(3):
        if number not in gone:
            assert answer.ended[number].reason == "length"
        elif not was_done and len(before[number]) < 9:
            assert answer.ended[number].reason == "cancelled"
            assert answer.ids(number) == before[number]
    alone = World(hf=hf, head_map=random_map(hf, seed), store=STORE)
    wanted = alone.ask(other, policy="reuse", **options)
    assert_same(hf, other, world.answers[stays].tokens[0], wanted.tokens[0])
    world.assert_empty()


def test_cancelling_who_waits_and_who_is_unknown() -> None:
    world = World(max_requests=1)
    first = world.submit(prompt_of(A), max_tokens=20)
    world.turn()
    waits = world.submit(prompt_of(B))
    world.turn()
    world.engine.cancel(Cancel(request_id=waits))
    world.engine.cancel(Cancel(request_id="nobody"))
    world.engine.cancel(Cancel(request_id=first, choice=7))
    world.run()
    assert world.answers[waits].reasons == ["cancelled"]
    assert world.answers[waits].report is None
    assert world.answers[first].reasons == ["length"]
    assert world.count("requests.cancelled") == 1


@pytest.mark.parametrize("turns", [1, 3, 6])
def test_an_aborted_prefill_leaves_nothing_to_be_found(turns: int) -> None:
    prompt = prompt_of(A, B)
    world = World(policy="prefix", step_ms=0.0001)
    goes = world.submit(prompt)
    for _ in range(turns):
        world.turn()
    assert world.answers[goes].report is None, "it should still prefill"
    world.engine.cancel(Cancel(request_id=goes))
    assert world.pool.num_used == 1
    again = world.ask(prompt, logprobs=5)
    assert again.told.cached_tokens == 0
    assert again.tokens == World(policy="prefix").ask(prompt, logprobs=5).tokens


class Broken(Reuse):
    """A policy with a fault."""

    def keep(self, stage: Stage) -> torch.Tensor:
        if stage.layer == 2:
            raise ValueError("no idea what to keep")
        return stage.active


def test_a_policy_that_fails_ends_its_request_alone() -> None:
    world = World(policy=Broken(), store=STORE, step_ms=0.001)
    fine = world.submit(prompt_of(B, lead=4), policy="dense", max_tokens=30)
    bad = world.submit(prompt_of(A, lead=8), n=2)
    world.run()
    assert world.answers[bad].reasons == ["error", "error"]
    assert world.answers[bad].ended[0].message == "ValueError: no idea what to keep"
    assert world.answers[fine].reasons == ["length"]
    assert world.ask(prompt_of(A, lead=8), policy="reuse").reasons == ["length"]
    world.assert_empty()


@pytest.mark.parametrize("where", ["look_up", "remember"])
def test_a_fault_at_either_end_of_prefill_ends_the_request_alone(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(step_ms=0.001)
    fine = world.submit(prompt_of(B, lead=4), max_tokens=30)
    for _ in range(10):
        world.turn()

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("a fault")

    monkeypatch.setattr(world.session, where, fails)
    bad = world.submit(prompt_of(A, lead=8), n=2)
    world.run()
    monkeypatch.undo()
    assert world.answers[bad].reasons == ["error", "error"]
    assert world.answers[fine].reasons == ["length"]
    world.assert_empty()


def test_a_failing_step_fails_those_who_decode_and_nobody_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(step_ms=0.001)
    bad = [world.submit(prompt_of(A, lead=lead), max_tokens=200) for lead in (1, 2)]
    while any(world.answers[one].report is None for one in bad):
        world.turn()
    waits = world.submit(prompt_of(D, lead=3))

    def fails(*_: object) -> None:
        raise RuntimeError("the device is gone\nwith details")

    monkeypatch.setattr(DecodeBatch, "step", fails)
    world.turn()
    monkeypatch.undo()
    world.run()
    for one in bad:
        assert world.answers[one].reasons == ["error"]
        assert world.answers[one].ended[0].message == "RuntimeError: the device is gone"
    assert world.answers[waits].reasons == ["length"]
    assert world.count("requests.error") == 2
    world.assert_empty()


def test_a_window_of_the_model_itself_is_no_beginning_of_another_prompt() -> None:
    """Its old pages are gone: a prompt that parts in the middle computes them."""
    hf = lively_hf("mistral")
    world = World(hf=hf, policy="prefix")
    prompt = prompt_of(A, B)
    world.ask(prompt, max_tokens=30)
    part = Prompt.of_ids([*prompt.token_ids[:100].tolist(), 5, 6, 7], [])
    for again in (part, prompt):
        got = world.ask(again, logprobs=2)
        assert_same(hf, again, got.tokens[0], World(hf=hf).ask(again, logprobs=2).tokens[0])
