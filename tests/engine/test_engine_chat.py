"""The next turn of a chat goes on from the pages of the one before, and nobody else does."""

from typing import Any

import pytest
import torch
from tests.engine.world import World, assert_same, prompt_of, segments
from tests.execution.eager import lively_hf
from tests.execution.test_masks import all_local, random_map
from tests.tiny import random_ids

from redknot.segments import Prompt

A, B, C, D = segments(60, 40, 33, 100)


def next_turn(prompt: Prompt, answer: list[int], more: int = 11, seed: int = 4) -> Prompt:
    """Prompt, answer and new text; the spans are those of before."""
    new = random_ids(more, seed).tolist()
    ids = [*prompt.token_ids.tolist(), *answer, *new]
    spans = [(span.start, span.stop) for span in prompt.spans]
    return Prompt.of_ids(ids, spans, (len(ids) - more, len(ids)))


def first_turn(policy: str, **options: Any) -> tuple[World, Prompt, list[int]]:
    hf = lively_hf()
    world = World(hf=hf, policy=policy, head_map=random_map(hf, 2))
    world.build(A, B)
    prompt = prompt_of(A, B)
    answer = world.ask(prompt, max_tokens=20, **options)
    return world, prompt, answer.ids()


@pytest.mark.parametrize("policy", ["reuse", "question_drop", "reuse:windows=decode", "epic:k=8"])
def test_a_turn_finds_what_the_turn_before_has_left(policy: str) -> None:
    world, prompt, answer = first_turn(policy)
    second = next_turn(prompt, answer)
    told = world.ask(second).told
    assert {one.hit for one in told.segments} == {"derived"}
    known = len(prompt) + len(answer) - 1  # the last token of an answer has no K/V
    assert told.recomputed_tokens == len(second) - known
    assert world.count("hit_tokens.derived") == len(A) + len(B)


def test_a_dense_turn_is_found_as_exact() -> None:
    world, prompt, answer = first_turn("prefix")
    told = world.ask(next_turn(prompt, answer)).told
    assert {one.hit for one in told.segments} == {"exact"}
    assert told.cached_tokens == len(prompt) + len(answer) - 1


def other_order(prompt: Prompt, answer: list[int]) -> Prompt:
    return next_turn(prompt_of(B, A), answer)


def other_question(prompt: Prompt, answer: list[int]) -> Prompt:
    ids = prompt.token_ids.clone()
    ids[-3] = (ids[-3] + 1) % 256
    return next_turn(Prompt(ids, prompt.spans, prompt.probe), answer)


@pytest.mark.parametrize(
    ("change", "options"),
    [
        (other_order, {}),
        (other_question, {}),
        (next_turn, {"policy": "epic:k=8"}),
        (next_turn, {"policy": "dense"}),
        (next_turn, {"policy": "prefix"}),
        (next_turn, {"exact": True}),
        (next_turn, {"salt": "another"}),
    ],
)
def test_nobody_else_finds_it(change: Any, options: dict[str, Any]) -> None:
    world, prompt, answer = first_turn("reuse")
    world.ask(change(prompt, answer), **options)
    assert world.count("hit_tokens.derived") == 0


@pytest.mark.parametrize("policy", ["reuse", "reuse:windows=decode"])
def test_what_goes_on_from_an_approximation_is_never_found_as_exact(policy: str) -> None:
    world, prompt, answer = first_turn(policy)
    second = next_turn(prompt, answer)
    assert {one.hit for one in world.ask(second).told.segments} == {"derived"}
    got = world.ask(second, policy="prefix", logprobs=2)
    first_segment = prompt.spans[0].start
    assert got.told.cached_tokens <= first_segment
    truth = World(hf=world.hf).ask(second, logprobs=2)
    assert_same(world.hf, second, got.tokens[0], truth.tokens[0])


def test_another_head_map_finds_nothing() -> None:
    world, prompt, answer = first_turn("reuse:windows=decode")
    opening = world.engine.opening
    opening.map_digest = random_map(world.hf, 3).digest()
    world.ask(next_turn(prompt, answer))
    assert world.count("hit_tokens.derived") == 0


@pytest.mark.parametrize(
    "policy", ["reuse", "question_drop:windows=decode", "reuse:windows=decode"]
)
def test_a_turn_says_what_going_on_in_the_same_pages_says(policy: str) -> None:
    """Also where decoding has given back what its windows no longer see."""
    hf = lively_hf()
    head_map = all_local(hf, 24, 4)
    world = World(hf=hf, policy=policy, head_map=head_map, chunk_tokens=None)
    world.build(A, B)
    prompt = prompt_of(A, B)
    answer = world.ask(prompt, max_tokens=40).ids()
    second = next_turn(prompt, answer)
    got = world.ask(second, max_tokens=1, logprobs=2)
    assert {one.hit for one in got.told.segments} == {"derived"}
    other = World(hf=hf, policy=policy, head_map=head_map, chunk_tokens=None)
    other.build(A, B)
    chosen, executor = other.engine.intake.policy, other.session.executor
    prefilled = other.session.prefill(prompt, chosen, head_map).retain()
    new = second.token_ids[len(prompt) :]
    logits = torch.cat([executor.extend(prefilled, token[None]) for token in new])[-1]
    known = logits.log_softmax(-1)
    best = known.topk(2)
    top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    wanted = type(got.tokens[0][0])(top[0][0], top[0][1], top)
    assert_same(hf, second, got.tokens[0], [wanted])
    world.assert_empty()


def test_a_chat_of_many_turns_computes_each_token_once() -> None:
    world, prompt, answer = first_turn("question_drop")
    for turn in range(4):
        known = len(prompt) + len(answer) - 1
        prompt = next_turn(prompt, answer, seed=turn)
        got = world.ask(prompt, max_tokens=10)
        answer = got.ids()
        assert got.told.recomputed_tokens == len(prompt) - known
    world.assert_empty()


def test_a_document_behind_the_question_of_a_turn_that_sees_by_windows() -> None:
    """The probe's rows behind the prompt go again, although windows have given back others."""
    hf = lively_hf()
    world = World(hf=hf, policy="question_drop:windows=decode", head_map=all_local(hf, 500, 4))
    world.build(A, B)
    prompt = prompt_of(A)
    second = next_turn(prompt, world.ask(prompt, max_tokens=20).ids())
    start, ids = len(second), second.token_ids.tolist()
    spans = [(span.start, span.stop) for span in second.spans] + [(start, start + len(B))]
    later = Prompt.of_ids([*ids, *B.tolist(), 5, 6, 7], spans, second.probe)
    answer = world.ask(later, max_tokens=4)
    assert answer.reasons == ["length"]
    assert [one.hit for one in answer.told.segments] == ["derived", "device"]


def test_what_goes_on_from_an_approximation_is_no_exact_hit() -> None:
    world, prompt, answer = first_turn("reuse")
    before = world.count("prefix_hits"), world.count("prefix_queries")
    second = next_turn(prompt, answer)
    world.ask(second)
    assert world.count("prefix_hits") == before[0]
    assert world.count("prefix_queries") == before[1] + len(second)
    world.ask(second, exact=True)
    assert world.count("prefix_queries") == before[1] + len(second)


def test_a_policy_that_takes_no_beginning_leaves_none_of_its_own() -> None:
    hf = lively_hf()
    world = World(hf=hf, policy="duo", head_map=all_local(hf, 8, 1))
    prompt = prompt_of(A)
    answer = world.ask(prompt, max_tokens=8)
    world.ask(next_turn(prompt, answer.ids()))
    scopes = {entry.scope for entry in world.session.beginnings._entries.values()}
    assert {scope.chain for scope in scopes} <= {""}
