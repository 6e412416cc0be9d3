"""An engine whose policy parts from dense falls back, and recovers once it no longer does."""

import pytest
import torch
from tests.engine.world import Answer, World, prompt_of, segments
from tests.execution.eager import lively_hf
from tests.execution.test_masks import all_local
from tests.tiny import random_ids

from redknot.engine.config import ShadowConfig
from redknot.engine.messages import Cancel
from redknot.engine.tasks import ShadowSide, shadow
from redknot.execution.turns import drained
from redknot.recovery.policies import Dense, parse_policy

A, B, C, D = segments(60, 40, 33, 100)


def shadowed(policy: str, threshold: float, **options: int) -> World:
    config = ShadowConfig(share=1.0, threshold=threshold, window=4, least=2, **options)
    world = World(policy=policy, shadow=config)
    world.build(A, B)
    return world


def ask(world: World, lead: int, **options: float) -> Answer:
    return world.ask(prompt_of(A, B, lead=3 * lead), max_tokens=12, **options)


def by_hand(world: World, lead: int, answer: list[int]) -> float:
    """Share of dense's tokens along an answer that the policy gave."""
    prompt = prompt_of(A, B, lead=3 * lead)
    session = World(hf=world.hf).session
    prefilled = session.prefill(prompt, Dense())
    best = [prefilled.logits.argmax()[None]]
    best.append(session.executor.extend(prefilled, torch.tensor(answer[:-1])).argmax(-1))
    return float((torch.cat(best) == torch.tensor(answer)).float().mean())


@pytest.mark.parametrize("policy", ["reuse", "question_drop"])
def test_agreement_is_what_one_computes_by_hand(policy: str) -> None:
    world = shadowed(policy, threshold=0.0)
    truth = [by_hand(world, lead, ask(world, lead).ids()) for lead in range(4)]
    assert world.count("shadow_runs") == 4
    assert world.count("shadow_agreement") == pytest.approx(sum(truth))
    assert world.engine.background.monitor.agreement == pytest.approx(sum(truth) / 4)
    assert min(truth) < 1, "a policy that reuses differs somewhere"
    world.assert_empty()


def test_both_ways_are_compared_along_any_answer() -> None:
    """Behind each token of the answer in turn, the last one left out."""
    world = shadowed("reuse", threshold=0.0)
    prompt, executor = prompt_of(A, B), world.session.executor
    known = world.session.look_up(prompt)
    sides = tuple(
        ShadowSide(policy, known, None) for policy in (Dense(), parse_policy("epic:k=36"))
    )
    shares = set()
    for seed in range(6):
        answer = random_ids(20, seed)
        best = []
        for side in sides:
            prefilled = executor.prefill(prompt.token_ids, known, side.policy)
            best.append([int(prefilled.logits.argmax())])
            for token in answer[:-1]:
                best[-1].append(int(executor.extend(prefilled, token[None])[-1].argmax()))
        equal = [one == other for one, other in zip(*best, strict=True)]
        found = drained(shadow(executor, prompt.token_ids, answer, sides))
        assert found == pytest.approx(sum(equal) / 20)
        shares.add(found)
    assert len(shares) > 2, "answers that tell nothing apart"


def test_a_bad_policy_falls_back_to_dense() -> None:
    world = shadowed("reuse", threshold=1.0)
    policies = [ask(world, lead).told.policy for lead in range(12)]
    assert policies[:2] == ["reuse", "reuse"]
    assert world.count("fallbacks") == 1
    at = policies.index("prefix")
    assert set(policies[at:]) == {"prefix"}
    told = ask(world, 20).told
    assert told.decision.startswith("agreement ")
    assert world.engine.background.fallback == told.decision
    world.assert_empty()


def test_it_recovers_once_the_policy_agrees() -> None:
    """EPIC that computes whole segments again is dense in all but name."""
    world = shadowed("epic:k=1000", threshold=0.9)
    monitor = world.engine.background.monitor
    monitor.add(0.0)
    monitor.add(0.0)
    assert monitor.fallback
    policies = [ask(world, lead).told.policy for lead in range(4)]
    assert policies[0] == "prefix"
    assert policies[-1] == "epic:k=1000"
    assert not world.engine.background.fallback


def test_sampled_answers_run_both_ways() -> None:
    world = shadowed("epic:k=1000", threshold=0.0)
    for lead in range(3):
        ask(world, lead, temperature=1.0, seed=lead)
    assert world.count("shadow_runs") == 3
    assert world.count("shadow_agreement") == pytest.approx(3)


def test_those_who_are_exempt_or_were_cancelled_run_once() -> None:
    world = shadowed("reuse", threshold=0.0)
    world.ask(prompt_of(A), exact=True)
    world.ask(prompt_of(A, lead=4), policy="dense")
    world.ask(prompt_of(D, lead=8))
    name = world.submit(prompt_of(A, lead=12), max_tokens=50)
    for _ in range(4):
        world.turn()
    world.engine.cancel(Cancel(request_id=name))
    world.run()
    assert world.count("shadow_runs") == 0


def test_every_shadow_ends_or_is_counted_as_dropped() -> None:
    world = shadowed("reuse", threshold=0.0)
    for lead in range(3):
        world.submit(prompt_of(A, B, lead=3 * lead), max_tokens=3)
    world.run()
    assert world.count("shadow_runs") + world.count("shadow_dropped") == 3
    world.assert_empty()


@pytest.mark.parametrize("policy", ["duo", "dense:windows=all", "reuse:windows=all"])
def test_windows_are_watched_where_nothing_is_reused(policy: str) -> None:
    hf = lively_hf()
    config = ShadowConfig(share=1.0)
    world = World(hf=hf, policy=policy, head_map=all_local(hf, 8, 1), shadow=config)
    for lead in range(3):
        world.ask(prompt_of(lead=20 * lead, question=40))
    assert world.count("shadow_runs") == 3
    world.ask(prompt_of(A), policy="reuse")  # nothing stored: what dense computes
    world.ask(prompt_of(A), policy="prefix")
    assert world.count("shadow_runs") == 3


def test_both_sides_of_a_run_hold_what_was_counted_for_one() -> None:
    config = ShadowConfig(share=1.0)
    world = World(policy="reuse", shadow=config, step_ms=0.01)
    world.build(D)
    name, most, counted = world.submit(prompt_of(D), temperature=1.0, seed=1), 0, 0
    while world.engine.scheduler.jobs:
        world.turn()
        world.session.beginnings.forget()
        for job in world.engine.scheduler.jobs.values():
            if job.is_task:
                most, counted = max(most, world.pool.num_used - 1), job.pages
    assert world.count("shadow_runs") == 1
    assert 0 < most <= counted
    assert world.answers[name].reasons == ["length"]
