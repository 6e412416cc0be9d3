"""A pool that is too small for everybody: some give way, all finish, with the same tokens."""

import random
from collections.abc import Callable

import pytest
from tests.engine.world import ROWS, World, assert_same, prompt_of, segments
from tests.execution.eager import lively_hf
from tests.execution.test_masks import all_local, random_map

from redknot.engine.messages import Refused, SegmentAdd, Segments
from redknot.engine.request import Choice, Request
from redknot.execution import Prefilled, PromptCache
from redknot.segments import MemoryStore
from redknot.segpaged import OutOfPages

A, B, C, D = segments(60, 40, 33, 100)


def pages(tokens: int) -> int:
    """Of a pool with room for one request of so many tokens."""
    return 1 + ROWS * -(-tokens // 16)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("policy", ["dense", "prefix", "reuse", "duo:windows=decode"])
def test_all_finish_with_the_tokens_of_a_large_pool(policy: str, seed: int) -> None:
    hf, draw = lively_hf(), random.Random(seed)
    world_map = random_map(hf, seed)
    store = MemoryStore()
    World(hf=hf, store=store).build(A, B)
    small = World(
        hf=hf, policy=policy, head_map=world_map, store=store,
        num_pages=pages(330), step_ms=draw.choice([0.01, 60.0]),
    )  # fmt: skip
    large = World(hf=hf, policy=policy, head_map=world_map, store=store)
    asked = []
    for number in range(7):
        prompt = prompt_of(*draw.sample([A, B, C], draw.randint(0, 2)), lead=20 * number + 1)
        options = {
            "max_tokens": draw.randint(20, 70), "n": draw.choice([1, 1, 2]),
            "logprobs": 2, "exact": draw.random() < 0.2,
        }  # fmt: skip
        name = small.submit(prompt, **options)
        large.submit(prompt, name=name, **options)
        asked.append((name, prompt))
    small.run()
    large.run()
    assert small.count("preemptions") > 0
    assert large.count("preemptions") == 0
    for name, prompt in asked:
        got, wanted = small.answers[name], large.answers[name]
        assert got.reasons == wanted.reasons
        for choice in wanted.tokens:
            assert_same(hf, prompt, got.tokens[choice], wanted.tokens[choice])
    small.assert_empty()


def test_computing_again_is_no_hit() -> None:
    """Random prompts, which have nothing in common: every hit would be a request's own."""
    world = World(policy="prefix", num_pages=pages(260), max_requests=8)
    prompts = [prompt_of(part, lead=30 * index) for index, part in enumerate(segments(*[60] * 6))]
    for prompt in prompts:
        world.submit(prompt, max_tokens=60)
    world.run()
    assert world.count("preemptions") > 0
    assert world.hit_tokens == 0
    assert world.count("prefix_hits") <= len(prompts), "BOS"
    assert world.count("prompt_tokens") == sum(len(prompt) for prompt in prompts)
    assert world.count("generation_tokens") == 60 * len(prompts)
    world.assert_empty()


def test_prompts_that_share_a_beginning_give_way_too() -> None:
    """Pages of one that gives way are still those of others: that is less than it held."""
    world = World(policy="prefix", num_pages=pages(352))
    world.ask(prompt_of(D), max_tokens=2)
    names = [world.submit(prompt_of(D, question=12 + i), max_tokens=60) for i in range(6)]
    world.run()
    assert world.count("preemptions") > 0
    assert [world.answers[name].reasons for name in names] == [["length"]] * 6
    world.assert_empty()


def test_one_that_joins_when_no_page_is_left_waits_for_the_next_turn() -> None:
    """Prompts that end with a page need pages at once for their first token."""
    world = World(num_pages=pages(320))
    for lead in range(5):
        world.submit(prompt_of(lead=30 * lead, question=56), max_tokens=40)
    world.run()
    assert all(answer.reasons == ["length"] for answer in world.answers.values())
    world.assert_empty()


def test_a_request_takes_the_pages_of_a_half_built_segment() -> None:
    world = World(num_pages=pages(480), build_idle=True)
    world.ask(prompt_of(*segments(250, seed=5)), max_tokens=1)
    world.session.beginnings.forget()
    world.turn()
    assert world.pool.num_used > 1, "half built"
    got = world.ask(prompt_of(*segments(300, seed=6)), max_tokens=2)
    assert got.reasons == ["length"]
    world.settle()
    assert world.count("builds") == 2, "taken up again"
    world.assert_empty()


def test_beginnings_give_way_to_requests() -> None:
    """Also between the moment that one is found and the moment that it is used."""
    world = World(policy="prefix", num_pages=pages(520), step_ms=0.001)
    first = prompt_of(D, lead=1)
    wanted = world.ask(first, logprobs=2)
    names = []
    for lead in (50, 90, 130):
        names.append(world.submit(prompt_of(D, lead=lead), logprobs=2))
    again = world.submit(first, logprobs=2)
    world.run()
    assert all(world.answers[name].reasons == ["length"] for name in names)
    assert_same(world.hf, first, world.answers[again].tokens[0], wanted.tokens[0])
    world.assert_empty()


def test_an_exact_request_starts_in_a_pool_that_beginnings_fill() -> None:
    world = World(num_pages=pages(400), policy="prefix")
    for lead in range(8):
        world.ask(prompt_of(lead=30 * lead + 1, question=60), max_tokens=2)
        got = world.ask(prompt_of(lead=30 * lead, question=60), exact=True, max_tokens=6)
        assert got.reasons == ["length"], got.ended[0].message
    world.assert_empty()


def test_a_registered_segment_waits_for_room() -> None:
    world = World(num_pages=pages(330))
    name = world.submit(prompt_of(D), max_tokens=60)
    for _ in range(3):
        world.turn()
    world.engine.background.ask(SegmentAdd(request_id="s", token_ids=segments(200)[0].tolist()))
    world.run()
    assert world.answers[name].reasons == ["length"]
    assert world.count("builds") == 1
    world.assert_empty()


def test_whoever_comes_back_gets_further() -> None:
    """One that gave way returns once there is room for prompt and answer so far, not before."""
    world, admitted = World(num_pages=pages(420)), list[str]()
    begin = world.engine.opening.begin

    def watched(request: Request, fallback: str) -> None:
        admitted.append(request.request_id)
        begin(request, fallback)

    world.engine.opening.begin = watched  # type: ignore[method-assign]
    names = [
        world.submit(prompt_of(segments(150, seed=index)[0], lead=30 * index), max_tokens=120)
        for index in range(3)
    ]
    world.run()
    assert [world.answers[name].reasons for name in names] == [["length"]] * 3
    assert world.count("preemptions") == len(admitted) - 3 > 0
    assert len(admitted) <= 6


@pytest.mark.parametrize("policy", ["question_drop:windows=decode", "dense"])
def test_what_cannot_end_is_refused_whatever_may_run(policy: str) -> None:
    """The planner may run dense, whose answers hold all they have seen."""
    hf = lively_hf()
    world = World(
        hf=hf, policy=policy, head_map=all_local(hf, 16, 4), planned=True, num_pages=pages(400)
    )
    got = world.offer(prompt_of(), max_tokens=200, n=4)
    assert isinstance(got, Refused)
    assert (got.status, got.code) == (400, "too_large")


def test_a_registered_segment_waits_for_pages() -> None:
    world = World(num_pages=pages(420), step_ms=0.01)
    world.submit(prompt_of(segments(100, seed=1)[0], lead=1), max_tokens=80)
    world.turn()
    asked = SegmentAdd(request_id="s", token_ids=segments(150, seed=3)[0].tolist())
    world.engine.background.ask(asked)
    world.turn()
    other = world.submit(prompt_of(segments(200, seed=2)[0], lead=60), max_tokens=80)
    world.run()
    (told,) = world.engine.background.mail
    assert isinstance(told, Segments), told
    assert told.segments[0].state == "ready"
    assert world.answers[other].reasons == ["length"]
    world.assert_empty()


def test_beginnings_stay_where_all_of_them_would_not_be_enough() -> None:
    world = World(policy="prefix", num_pages=pages(600))
    for lead in range(4):
        world.ask(prompt_of(lead=40 * lead, question=40), max_tokens=2)
    running = world.submit(prompt_of(lead=200, question=300), max_tokens=100)
    world.turn()
    before = world.session.beginnings.num_bytes
    with pytest.raises(OutOfPages):
        PromptCache.allocate(world.session.model.adapter, 600, world.session.executor.storage)
    assert world.session.beginnings.num_bytes == before > 0
    world.run()
    assert world.answers[running].reasons == ["length"]


@pytest.mark.parametrize("exact", [True, False])
def test_an_engine_that_computes_answers_again_shows_that_it_lives(exact: bool) -> None:
    """For each token that an exact request repeats, and each layer of the others."""
    world, signs = World(num_pages=pages(420), step_ms=0.01), list[int]()
    resume = world.engine.company.resume

    def watched(choice: Choice, prefilled: Prefilled, alive: Callable[[], None]) -> None:
        told = list[int]()
        resume(choice, prefilled, lambda: told.append(1))
        signs.append(len(told) - (len(choice.tokens) - 1 if exact else 4))

    world.engine.company.resume = watched  # type: ignore[method-assign]
    for index in range(3):
        prompt = prompt_of(segments(150, seed=index)[0], lead=30 * index)
        world.submit(prompt, max_tokens=120, exact=exact)
    world.run()
    assert signs
    assert min(signs) >= 0
