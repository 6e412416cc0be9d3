"""An exact request is bit-equal to an engine without reuse, whatever else goes on."""

from collections.abc import Sequence
from typing import Any

import pytest
from tests.engine.world import Answer, World, prompt_of, segments
from tests.execution.eager import lively_hf
from tests.execution.test_masks import random_map

from redknot.kernels.attend import DecodePlan

A, B, C, D = segments(60, 40, 33, 100)
PROMPT = prompt_of(A, B, lead=3)
EXACT: dict[str, Any] = {"exact": True, "logprobs": 5, "max_tokens": 24}
SAMPLED = EXACT | {"temperature": 0.9, "seed": 5, "n": 2}


def plain(**options: Any) -> Answer:
    """Dense, nothing stored, nobody else."""
    return World().ask(PROMPT, **options)


@pytest.mark.parametrize("options", [EXACT, SAMPLED])
def test_bits_are_those_of_a_dense_engine_with_nothing_stored(options: dict[str, Any]) -> None:
    wanted = plain(**options)
    hf = lively_hf()
    busy = World(hf=hf, head_map=random_map(hf, 1), policy="question_drop", step_ms=0.01)
    busy.build(A, B, D)
    busy.ask(PROMPT)
    busy.ask(PROMPT, policy="prefix")
    names = [busy.submit(prompt_of(A, D, lead=40 * i), max_tokens=40, n=2) for i in range(2)]
    for _ in range(4):
        busy.turn()
    name = busy.submit(PROMPT, **options)
    busy.run()
    assert busy.answers[name].tokens == wanted.tokens
    for other in names:
        assert set(busy.answers[other].reasons) == {"length"}
    for _ in range(2):
        assert busy.ask(PROMPT, **options).tokens == wanted.tokens, "idle, and again"


def test_bits_survive_a_preemption() -> None:
    wanted = plain(**EXACT)
    world = World(num_pages=1 + 8 * 21, step_ms=0.01)
    for lead in (9, 50):
        world.submit(prompt_of(D, lead=lead), max_tokens=80)
    name = world.submit(PROMPT, **EXACT)
    world.run()
    assert world.count("preemptions") > 0
    assert world.answers[name].tokens == wanted.tokens
    world.assert_empty()


def test_an_exact_request_finds_nothing_and_leaves_nothing() -> None:
    world = World(policy="prefix")
    world.build(A)
    world.ask(PROMPT, exact=True)
    assert world.session.beginnings.num_bytes == 0
    assert world.pool.num_used == 1
    world.ask(PROMPT)
    before = world.count("prefix_hits")
    told = world.ask(PROMPT, exact=True).told
    assert (told.policy, told.decision, told.cached_tokens) == ("dense", "exact", 0)
    assert told.recomputed_tokens == len(PROMPT)
    assert [one.hit for one in told.segments] == ["none", "none"]
    assert world.count("prefix_hits") == before
    assert world.count("cached_tokens") == 0


def test_the_default_is_not_exact_where_something_is_reused() -> None:
    """Otherwise the tests above would show nothing."""
    world = World(policy="reuse")
    world.build(A, B)
    got = world.ask(PROMPT, **(EXACT | {"exact": False}))
    assert got.tokens != plain(**EXACT).tokens


def test_a_preempted_request_decodes_by_the_plans_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """How keys are split is chosen by length; another split rounds differently on a GPU."""
    real = DecodePlan.of

    def lengths_of(world: World, others: int) -> list[int]:
        made = list[int]()

        def watched(lengths: Sequence[int], *rest: Any) -> DecodePlan:
            made.extend(lengths if len(lengths) == 1 else [])
            return real(lengths, *rest)

        for lead in (9, 50)[:others]:
            world.submit(prompt_of(D, lead=lead), max_tokens=80, n=2)
        name = world.submit(PROMPT, **EXACT)
        with monkeypatch.context() as patched:
            patched.setattr(DecodePlan, "of", watched)
            world.run()
        assert world.answers[name].reasons == ["length"]
        return made

    alone = lengths_of(World(), 0)
    crowded = World(num_pages=1 + 8 * 30, step_ms=0.01)
    pressed = lengths_of(crowded, 2)
    assert crowded.count("preemptions") > 0
    assert set(pressed) == set(alone)
