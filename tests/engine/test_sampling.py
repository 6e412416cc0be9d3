"""How tokens are chosen and answers end, and what is refused before any work."""

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engine.world import World, prompt_of, segments
from tests.execution.eager import lively_hf

from redknot.engine.messages import Grammar, Refused
from redknot.execution.batch import DecodeBatch
from redknot.recovery.policies import Dense
from redknot.segments import Prompt, Span

A, B, C, D = segments(60, 40, 33, 100)
PROMPT = prompt_of(A)
SEEDED: dict[str, Any] = {"temperature": 1.2, "seed": 3, "max_tokens": 12}


def test_a_seed_gives_the_same_tokens_and_each_choice_its_own() -> None:
    world = World()
    first = world.ask(PROMPT, **SEEDED, n=3)
    assert world.ask(PROMPT, **SEEDED, n=3).all_ids == first.all_ids
    assert len({tuple(ids) for ids in first.all_ids}) == 3
    shifted = world.ask(PROMPT, **(SEEDED | {"seed": 4}))
    assert shifted.ids() == first.ids(1), "seeds count up"
    free = [world.ask(PROMPT, temperature=1.2, max_tokens=12).ids() for _ in range(2)]
    assert free[0] != free[1]


def test_greedy_tokens_are_the_likeliest() -> None:
    world = World()
    prefilled = world.session.prefill(PROMPT, Dense())
    wanted = [int(prefilled.logits.argmax())]
    batch = DecodeBatch(world.session.executor, 1, 200)
    batch.add(prefilled)
    while len(wanted) < 10:
        wanted.append(int(batch.step([wanted[-1]])[0].argmax()))
    assert World().ask(PROMPT, max_tokens=10).ids() == wanted


@pytest.mark.parametrize("told", [1, 5, 300])
def test_logprobs_are_those_of_a_distribution(told: int) -> None:
    answer = World().ask(PROMPT, **SEEDED, logprobs=told)
    for token in answer.tokens[0]:
        values = [value for _, value in token.top]
        assert len(token.top) == told
        assert values == sorted(values, reverse=True)
        assert token.logprob is not None
        assert token.logprob <= values[0] + 1e-6
        known = dict(token.top)
        if token.token_id in known:
            assert known[token.token_id] == token.logprob
        total = sum(math.exp(value) for value in values)
        assert total == pytest.approx(1, abs=1e-4) if told == 300 else total < 1


def test_no_alternatives_or_no_logprobs_at_all() -> None:
    (token, *_) = World().ask(PROMPT, logprobs=0).tokens[0]
    assert token.top == ()
    assert token.logprob is not None
    (token, *_) = World().ask(PROMPT).tokens[0]
    assert (token.top, token.logprob) == ((), None)


SCHEMAS = [
    {"enum": ["red", "blue"]},
    {"type": "boolean"},
    {"type": "string", "pattern": "^[a-c]{2}$"},
    {"type": "integer", "minimum": 10, "maximum": 12},
]


@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.sampled_from(SCHEMAS), st.integers(0, 100), st.sampled_from([0.0, 1.5]))
def test_an_answer_obeys_its_schema(schema: dict[str, Any], seed: int, heat: float) -> None:
    world = World()
    grammar = Grammar(kind="json_schema", schema=json.dumps(schema))
    options: dict[str, Any] = {"temperature": heat, "seed": seed, "logprobs": 3}
    answer = world.ask(PROMPT, grammar=grammar, max_tokens=30, ignore_eos=False, **options)
    assert answer.reasons == ["stop"]
    text = world.session.model.tokenizer.decode(answer.ids()[:-1])
    value = json.loads(text)
    assert value in ("red", "blue", True, False, 10, 11, 12) or set(value) <= set("abc")
    assert all(math.isfinite(value) for token in answer.tokens[0] for _, value in token.top)


def test_any_object_begins_as_one() -> None:
    world = World()
    options: dict[str, Any] = {"temperature": 1.0, "seed": 1, "ignore_eos": False}
    answer = world.ask(PROMPT, grammar=Grammar(kind="json_object"), max_tokens=20, **options)
    text = world.session.model.tokenizer.decode(answer.ids())
    assert text.lstrip().startswith("{")


def test_a_grammar_beside_others_touches_nobody() -> None:
    world = World()
    grammar = Grammar(kind="json_schema", schema='{"enum": ["red"]}')
    names = [world.submit(prompt_of(B, lead=3), max_tokens=20)]
    names.append(world.submit(PROMPT, grammar=grammar, ignore_eos=True, max_tokens=20))
    world.run()
    assert world.answers[names[0]].ids() == World().ask(prompt_of(B, lead=3), max_tokens=20).ids()
    assert world.answers[names[1]].reasons == ["length"]


@pytest.mark.parametrize("schema", ["{", '{"type": "nothing"}', "[]", '{"$ref": "#/no"}'])
def test_a_grammar_that_cannot_be_followed_is_refused(schema: str) -> None:
    world = World()
    got = world.offer(PROMPT, grammar=Grammar(kind="json_schema", schema=schema))
    assert isinstance(got, Refused)
    assert (got.status, got.message.count("\n")) == (400, 0)
    assert world.engine.is_idle


def test_every_end_token_ends_an_answer_and_is_told() -> None:
    """Of the model's configuration, which may name several, and of the request."""
    ids = World().ask(PROMPT, **SEEDED).ids()
    hf = lively_hf()
    hf.generation_config.eos_token_id = [257, ids[2], ids[4]]
    world = World(hf=hf)
    answer = world.ask(PROMPT, **SEEDED, ignore_eos=False)
    assert answer.reasons == ["stop"]
    assert answer.ended[0].stop_token == answer.ids()[-1]
    assert answer.ids() == ids[: min(ids.index(ids[2]), ids.index(ids[4])) + 1]
    assert world.ask(PROMPT, **SEEDED).ids() == ids, "ignored"
    own = world.ask(PROMPT, **SEEDED, stop_token_ids=(ids[3],))
    assert own.ids() == ids[: ids.index(ids[3]) + 1]
    assert own.ended[0].stop_token == ids[3]
    first = world.ask(PROMPT, **SEEDED, stop_token_ids=(ids[0],))
    assert (first.ids(), first.reasons) == (ids[:1], ["stop"])
    world.assert_empty()


def bad(ids: list[int], spans: list[tuple[int, int]], probe: tuple[int, int]) -> Prompt:
    return Prompt(torch.tensor(ids, dtype=torch.int64), tuple(Span(*one) for one in spans), probe)


@pytest.mark.parametrize(
    "prompt",
    [
        bad([], [], (0, 0)),
        bad([1, -1, 3], [], (0, 3)),
        bad([1, 300, 3], [], (0, 3)),
        bad([1] * 9, [(2, 4), (3, 5)], (0, 9)),
        bad([1] * 9, [(4, 6), (1, 2)], (0, 9)),
        bad([1] * 9, [(4, 10)], (0, 9)),
        bad([1] * 9, [(4, 4)], (0, 9)),
        bad([1] * 9, [(-1, 4)], (0, 9)),
        bad([1] * 9, [], (3, 3)),
        bad([1] * 9, [], (3, 10)),
        bad([1] * 9, [], (-1, 4)),
    ],
)
def test_prompts_that_cannot_be_are_refused(prompt: Prompt) -> None:
    refuse(World(), prompt)


@pytest.mark.parametrize(
    "options",
    [
        {"policy": "magic"},
        {"policy": "epic:k=x"},
        {"policy": "redknot"},
        {"max_tokens": 0},
        {"temperature": -1.0},
        {"top_p": 0.0},
        {"n": 0},
        {"n": 9},
        {"logprobs": 301},
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any]) -> None:
    refuse(World(), PROMPT, **options)


def refuse(world: World, prompt: Prompt, **options: Any) -> None:
    got = world.offer(prompt, **options)
    assert isinstance(got, Refused)
    assert (got.status, got.message.count("\n")) == (400, 0)
    assert world.count("refused") == 1
    assert world.engine.is_idle
    world.assert_empty()


def test_prompt_and_answer_fill_the_context_and_no_more() -> None:
    world = World(num_pages=1 + 8 * 20)
    limit = world.engine.intake.context_length
    prompt = Prompt.of_ids([256] * (limit - 5), [])
    assert world.ask(prompt, max_tokens=5).reasons == ["length"]
    got = world.offer(prompt, max_tokens=6)
    assert isinstance(got, Refused)
    assert (got.status, got.code) == (400, "context_length_exceeded")
    assert all(str(number) in got.message for number in (limit - 5, 6, limit))
    world.assert_empty()


def test_a_full_queue_and_an_engine_that_drains_refuse() -> None:
    world = World(max_requests=1, max_waiting=2)
    world.submit(PROMPT, max_tokens=20)
    world.turn()
    for _ in range(2):
        world.submit(PROMPT)
    got = world.offer(PROMPT)
    assert isinstance(got, Refused)
    assert (got.status, got.code) == (429, "queue_full")
    world.engine.draining = True
    got = world.offer(PROMPT)
    assert isinstance(got, Refused)
    assert got.status == 503
    world.run()
    assert all(answer.reasons == ["length"] for answer in world.answers.values())
