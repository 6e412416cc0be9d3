"""What goes wrong with one piece of work ends that work alone."""

import gc
import json
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from tests.engine.world import World, prompt_of, segments

from redknot.engine.messages import Cancel, Grammar
from redknot.engine.sampling import Picker
from redknot.execution import PromptCache, executor
from redknot.execution.sampling import Chooser, Sampling
from redknot.segments import MemoryStore

A, B = segments(60, 40)


class Odd(Exception):
    """As libraries raise them: of no kind that anybody expects."""


def test_a_choice_whose_sampling_fails_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also beside others of its own request."""
    real, picked = Picker.pick, list[Picker]()

    def fails(self: Picker, logits: torch.Tensor) -> Any:
        picked.append(self)
        if len(picked) in (2, 9):
            raise Odd("no token")
        return real(self, logits)

    monkeypatch.setattr(Picker, "pick", fails)
    world = World()
    both = world.submit(prompt_of(lead=3), max_tokens=20, n=2, temperature=1.0, seed=1)
    other = world.submit(prompt_of(lead=30), max_tokens=20, temperature=1.0, seed=2)
    plain = world.submit(prompt_of(lead=60), max_tokens=20)
    world.run()
    reasons = [world.answers[name].reasons for name in (both, other, plain)]
    assert (
        sorted(sum(map(Counter, reasons), Counter()).elements()) == ["error"] * 2 + ["length"] * 2
    )
    assert reasons[2] == ["length"]
    ends = [end for name in (both, other) for end in world.answers[name].ended.values()]
    assert {end.message for end in ends} == {"", "Odd: no token"}
    world.assert_empty()


def test_any_kind_of_error_is_a_requests_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **options: Any) -> Any:
        raise Odd("a library's own")

    world = World()
    world.ask(prompt_of(lead=7))
    with monkeypatch.context() as patched:
        patched.setattr(executor.Recovery, "run", fails)
        assert world.ask(prompt_of(lead=40)).reasons == ["error"]
    assert world.ask(prompt_of(lead=40)).reasons == ["length"]
    world.assert_empty()


@pytest.mark.parametrize("temperature", [5e-324, 1e-45, 2.2e-39, 1e-10, 1e-5, 1e-3, 2.0])
@pytest.mark.parametrize("scale", [1.0, 1e4, 1e30])
def test_no_temperature_makes_a_draw_fail(temperature: float, scale: float) -> None:
    chooser = Chooser(Sampling(temperature=temperature, top_p=0.9, seed=3), torch.device("cpu"))
    logits = scale * torch.tensor([-1.0, 3.0, 2.0, float("-inf")])
    drawn = {chooser(logits) for _ in range(50)}
    assert drawn <= {0, 1, 2}
    if temperature <= 1e-3:
        assert drawn == {1}


def test_draws_follow_the_probabilities() -> None:
    """Within four standard deviations of so many draws."""
    chooser, count = Chooser(Sampling(temperature=0.7, seed=1), torch.device("cpu")), 4000
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    drawn = torch.tensor([chooser(logits) for _ in range(count)]).bincount(minlength=4) / count
    wanted = (logits / 0.7).softmax(-1)
    assert ((drawn - wanted).abs() <= 4 * (wanted * (1 - wanted) / count).sqrt()).all()


def test_a_grammar_that_fails_on_its_way_is_an_error_not_an_end() -> None:
    many = {"type": "object", "properties": {f"k{at}": {"type": "string"} for at in range(1000)}}
    grammar = Grammar(kind="json_schema", schema=json.dumps(many))
    world = World()
    other = world.submit(prompt_of(lead=30), max_tokens=20)
    answer = world.ask(prompt_of(lead=3), max_tokens=20, ignore_eos=False, grammar=grammar)
    assert answer.reasons == ["error"]
    assert answer.ended[0].message.startswith("RuntimeError: response_format")
    assert world.answers[other].reasons == ["length"]
    world.assert_empty()


def test_an_answer_that_is_whole_counts_as_stopped() -> None:
    """Stop strings are the server's: the engine learns of them by a word."""
    world = World()
    name = world.submit(prompt_of(lead=3), max_tokens=200)
    for _ in range(5):
        world.turn()
    world.engine.cancel(Cancel(request_id=name, choice=0, reason="stop"))
    world.run()
    assert world.answers[name].reasons == ["stop"]
    assert (world.count("requests.stop"), world.count("requests.cancelled")) == (1, 0)


def test_what_a_request_had_found_goes_with_it() -> None:
    """Evicted state lives no longer than those who use it, whether or not a collector runs."""
    bytes_of_one = 4 * 2 * 2 * 64 * 16 * 4
    world, states = World(policy="reuse", store=MemoryStore(2 * bytes_of_one + 10)), []
    gc.collect()
    gc.disable()
    try:
        for number, document in enumerate(segments(*[64] * 12)):
            world.build(document)
            name = world.submit(prompt_of(document, lead=number))
            world.turn()
            found = world.engine.requests[name].known
            assert found is not None
            states.append(weakref.ref(found.hits[0][1].planes["key"]))
            del found
            world.run()
        alive = sum(state() is not None for state in states)
    finally:
        gc.enable()
    assert alive <= 2  # those that are stored


def test_an_answer_whose_pages_cannot_be_kept_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(cache: PromptCache) -> PromptCache:
        raise Odd("no memory")

    world = World(policy="prefix")
    names = [world.submit(prompt_of(lead=30 * at), max_tokens=5 + 9 * at) for at in range(2)]
    while len(world.engine.company) < 2:
        world.turn()
    with monkeypatch.context() as patched:
        patched.setattr(PromptCache, "fork", fails)
        world.run()
    assert [world.answers[name].reasons for name in names] == [["length"]] * 2
    world.assert_empty()
