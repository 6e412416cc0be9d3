"""Documents are found again in any order and place, and only what is new is computed."""

import pytest
import torch
from tests.execution.eager import assert_near, lively_session, rounding, spanned
from tests.tiny import random_ids

from redknot.execution.session import Session
from redknot.recovery import Policy
from redknot.recovery.policies import (
    CacheBlend,
    Dense,
    Epic,
    LayerDrop,
    Question,
    QuestionDrop,
    Reuse,
)
from redknot.segments import Prompt, PromptTemplate

A, B, C = "alpha apple " * 9, "bravo banana " * 7, "charlie cherry " * 8
POLICIES: list[Policy] = [
    Dense(),
    Reuse(),
    Epic(),
    CacheBlend(),
    Question(),
    QuestionDrop(windows="none"),
    LayerDrop(),
]


def letters(count: int, seed: int = 3) -> str:
    """Text of ``count`` byte tokens."""
    return bytes(97 + byte % 26 for byte in random_ids(count, seed).tolist()).decode()


def statuses(session: Session, prompt: Prompt) -> list[str]:
    return [outcome.status for outcome in session.look_up(prompt).outcomes]


def greedy(session: Session, prompt: Prompt, policy: Policy, count: int = 4) -> list[int]:
    prefilled = session.prefill(prompt, policy, room=count)
    tokens = [int(prefilled.logits.argmax())]
    while len(tokens) < count:
        logits = session.executor.extend(prefilled, torch.tensor(tokens[-1:]))
        tokens.append(int(logits[-1].argmax()))
    return tokens


def outside(prompt: Prompt) -> list[int]:
    """Positions of no segment."""
    inside = {i for span in prompt.spans for i in range(span.start, span.stop)}
    return [i for i in range(len(prompt)) if i not in inside]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_the_same_request_again_reuses_every_document_token_and_repeats_itself(
    policy: Policy,
) -> None:
    session = lively_session()
    prompt = session.tokeniser.prompt([A, B], "Why?")
    cold = greedy(session, prompt, policy)
    assert cold == greedy(lively_session(), prompt, Dense())  # first sight is dense
    session.build_missing(prompt)
    lookup = session.look_up(prompt)
    assert {outcome.status for outcome in lookup.outcomes} == {"stored"}
    assert sum(len(span) for span, _ in lookup.hits) == sum(map(len, prompt.spans))
    warm = greedy(session, prompt, policy)
    assert warm == greedy(session, prompt, policy)


def test_what_was_new_in_one_request_is_stored_for_the_next() -> None:
    session = lively_session()
    seen = []
    for documents in ([A, B], [A, C], [C, A]):
        prompt = session.tokeniser.prompt(documents, "Why?")
        seen.append(statuses(session, prompt))
        session.prefill(prompt, Reuse())
        session.build_missing(prompt)
    assert seen == [["new", "new"], ["stored", "new"], ["stored", "stored"]]


def test_a_question_before_an_unchanged_document_leaves_it_reused() -> None:
    template = PromptTemplate(question_first=True)
    session = lively_session(template=template)
    document = letters(600)
    session.build_missing(session.tokeniser.prompt([document], "Who?", "Be brief."))
    prompt = session.tokeniser.prompt([document], "And where, please?", "Be brief.")
    assert statuses(session, prompt) == ["stored"]
    span = prompt.spans[0]
    assert len(span) > 0.9 * 600
    for layer in session.prefill(prompt, Reuse()).plan.layers:
        assert not ((layer.active >= span.start) & (layer.active < span.stop)).any()


def test_pure_reuse_computes_exactly_the_tokens_outside_segments() -> None:
    session, prompt = lively_session(), spanned(40, 1, 33)
    session.build_missing(prompt)
    for layer in session.prefill(prompt, Reuse()).plan.layers:
        assert layer.active.tolist() == outside(prompt)
    again = session.prefill(prompt, Reuse())  # now the beginning is known exactly
    assert again.layout.exact == prompt.spans[0].start
    for layer in again.plan.layers:
        assert layer.active.tolist() == outside(prompt)[again.layout.exact :]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_a_prompt_that_ends_within_a_segment_computes_its_last_token(policy: Policy) -> None:
    session = lively_session()
    prompt = Prompt.of_ids([256, *random_ids(60).tolist()], [(5, 30), (30, 61)])
    session.build_missing(prompt)
    prefilled = session.prefill(prompt, policy)
    assert bool(torch.isfinite(prefilled.logits).all())
    assert all(int(layer.active[-1]) == 60 for layer in prefilled.plan.layers)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_stored_and_new_documents_mix(policy: Policy) -> None:
    session, prompt = lively_session(), spanned(40, 25, 33)
    for span in (prompt.spans[0], prompt.spans[2]):
        session.build(prompt.token_ids[span.start : span.stop])
    assert statuses(session, prompt) == ["stored", "new", "stored"]
    plan = session.prefill(prompt, policy).plan
    always = {*outside(prompt), *range(prompt.spans[1].start, prompt.spans[1].stop)}
    for layer in plan.layers:
        assert always <= set(layer.active.tolist())


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_on_an_empty_store_every_policy_is_dense(policy: Policy) -> None:
    session, prompt = lively_session(), spanned(40, 25, 33)
    assert statuses(session, prompt) == ["new"] * 3
    with torch.inference_mode():
        truth = session.model.hf(prompt.token_ids[None]).logits[0, -1]
    prefilled = session.prefill(prompt, policy)
    assert_near(prefilled.logits, truth, rounding(session.model.hf, len(prompt)))
    assert prefilled.plan.probe_rows == 0
    assert prefilled.flops == session.prefill(prompt, Dense()).flops


def test_a_document_twice_in_one_prompt_is_built_once_and_used_twice() -> None:
    session = lively_session()
    prompt = session.tokeniser.prompt([A, B, A], "Why?")
    assert session.build_missing(prompt) == 2
    assert len(session.store.keys()) == 2
    lookup = session.look_up(prompt)
    assert [outcome.status for outcome in lookup.outcomes] == ["stored"] * 3
    assert lookup.hits[0][1] is lookup.hits[2][1]
    plan = session.prefill(prompt, Reuse()).plan
    assert plan.layers[0].active.tolist() == outside(prompt)


def test_a_document_split_in_two_is_new_and_right() -> None:
    session, whole, halves = lively_session(), spanned(60), spanned(30, 30)
    assert torch.equal(whole.token_ids, halves.token_ids)
    session.build_missing(whole)
    outcomes = session.look_up(halves).outcomes
    assert [(out.status, out.reason) for out in outcomes] == [("new", "not stored")] * 2
    empty = lively_session().prefill(halves, Reuse()).logits
    assert torch.equal(session.prefill(halves, Reuse()).logits, empty)


def test_a_prompt_that_does_not_start_with_the_anchor_misses_and_says_so() -> None:
    session, prompt = lively_session(), spanned(40)
    session.build_missing(prompt)
    ids = prompt.token_ids.clone()
    ids[0] = 65
    other = Prompt(ids, prompt.spans, prompt.probe)
    outcome = session.look_up(other).outcomes[0]
    assert (outcome.status, "anchor" in outcome.reason) == ("new", True)
    assert session.build_missing(other) == 0
    with torch.inference_mode():
        truth = session.model.hf(ids[None]).logits[0, -1]
    assert_near(session.prefill(other, Reuse()).logits, truth, rounding(session.model.hf, len(ids)))


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
@pytest.mark.parametrize("spans", [[], [(0, 1)]])
def test_a_prompt_of_one_token_runs(policy: Policy, spans: list[tuple[int, int]]) -> None:
    session = lively_session(add_bos=False)
    prompt = Prompt.of_ids([65], spans, (0, 1))
    session.build_missing(prompt)
    with torch.inference_mode():
        truth = session.model.hf(prompt.token_ids[None]).logits[0, -1]
    bound = rounding(session.model.hf, 1)
    assert_near(session.prefill(prompt, policy).logits, truth, bound)


def test_a_document_changed_by_one_token_is_new() -> None:
    session = lively_session()
    session.build_missing(session.tokeniser.prompt([A, B], "Why?"))
    assert statuses(session, session.tokeniser.prompt([A[:-2] + "x ", B], "Why?")) == [
        "new",
        "stored",
    ]
