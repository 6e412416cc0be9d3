"""Exact prefixes: a known beginning is taken over and changes nothing."""

import pytest
import torch
from tests.execution.eager import assert_near, forward, lively_session, rounding, spanned
from tests.tiny import random_ids

from redknot.heads import HeadMap
from redknot.recovery import Policy
from redknot.recovery.policies import CacheBlend, Dense, Duo, Prefix, QuestionDrop, RedKnot, Reuse
from redknot.segments import Prompt

NAMES = ["llama", "qwen2-14/2", "mistral", "llama-1"]


def plain(count: int, seed: int = 0) -> Prompt:
    """A prompt without segments."""
    return Prompt.of_ids([256, *random_ids(count - 1, seed).tolist()], [])


@pytest.mark.parametrize("tokens", [2, 15, 16, 17, 32, 64])
@pytest.mark.parametrize("name", NAMES)
def test_a_fully_known_prompt_computes_only_its_last_token(name: str, tokens: int) -> None:
    """Three times: the second run must leave intact what the third finds."""
    session, prompt = lively_session(name), plain(tokens)
    bound = rounding(session.model.hf, tokens)
    cold = session.prefill(prompt, Prefix())
    with torch.inference_mode():
        truth = session.model.hf(prompt.token_ids[None]).logits[0, -1]
    assert_near(cold.logits, truth, bound)
    runs = [session.prefill(prompt, Prefix()) for _ in range(3)]
    for run in runs:
        assert_near(run.logits, cold.logits, bound)
        assert torch.equal(run.logits, runs[0].logits)
        assert all(layer.active.tolist() == [tokens - 1] for layer in run.plan.layers)


@pytest.mark.parametrize("new", [1, 2, 5, 40])
@pytest.mark.parametrize("name", NAMES)
def test_new_tokens_behind_a_known_beginning_equal_dense(name: str, new: int) -> None:
    session, known = lively_session(name), plain(48)
    session.prefill(known, Prefix())
    ids = [*known.token_ids.tolist(), *random_ids(new, seed=9).tolist()]
    prompt = Prompt.of_ids(ids, [])
    prefilled = session.prefill(prompt, Prefix(), room=3)
    assert prefilled.layout.exact == 48
    assert all(len(layer.active) == new for layer in prefilled.plan.layers)
    more = random_ids(3, seed=10)
    truth = forward(session.model.hf, torch.cat([prompt.token_ids, more]))
    bound = rounding(session.model.hf, len(ids) + 3)
    assert_near(prefilled.logits, truth.logits[len(ids) - 1], bound)
    assert_near(session.executor.extend(prefilled, more), truth.logits[len(ids) :], bound)


def test_the_next_turn_of_a_chat_finds_all_of_the_last() -> None:
    """What a hit left to compute is kept as well."""
    session, ids = lively_session(), [256, *random_ids(90).tolist()]
    exact = []
    for end in (30, 60, 90):
        exact.append(session.prefill(Prompt.of_ids(ids[:end], []), Prefix()).layout.exact)
    assert exact == [0, 30, 60]


@pytest.mark.parametrize("stored", [False, True])
def test_both_caches_together_change_nothing_over_three_runs(stored: bool) -> None:
    """A prompt whose last piece is partial, with segments stored or not."""
    session, prompt = lively_session(), spanned(48, 16, question=4)
    if stored:
        session.build_missing(prompt)
    with torch.inference_mode():
        truth = session.model.hf(prompt.token_ids[None]).logits[0, -1]
    for _ in range(3):
        logits = session.prefill(prompt, Prefix()).logits
        assert_near(logits, truth, rounding(session.model.hf, len(prompt)))


def test_repeats_behind_a_prefix_are_identical_and_equal_the_first() -> None:
    for seed in range(8):
        session, prompt = lively_session(), plain(60, seed)
        runs = [session.prefill(prompt, Prefix()).logits for _ in range(4)]
        assert torch.equal(runs[1], runs[2])
        assert torch.equal(runs[2], runs[3])
        assert_near(runs[1], runs[0], rounding(session.model.hf, 60))
        best, second = runs[0].topk(2).values
        if best - second > 2 * rounding(session.model.hf, 60) * runs[0].abs().max():
            assert len({int(run.argmax()) for run in runs}) == 1


def test_a_changed_token_ends_the_common_beginning() -> None:
    session, prompt = lively_session(), plain(60)
    session.prefill(prompt, Prefix())
    ids = prompt.token_ids.clone()
    ids[33] = (ids[33] + 1) % 256
    changed = Prompt(ids, (), prompt.probe)
    prefilled = session.prefill(changed, Prefix())
    assert prefilled.layout.exact == 33
    truth = forward(session.model.hf, ids).logits[-1]
    assert_near(prefilled.logits, truth, rounding(session.model.hf, 60))


def test_documents_within_a_known_beginning_are_exact_and_need_no_stored_state() -> None:
    session, prompt = lively_session(), spanned(40, 20)
    session.prefill(prompt, Prefix())
    assert [outcome.status for outcome in session.look_up(prompt).outcomes] == ["exact", "exact"]
    longer = Prompt.of_ids([*prompt.token_ids.tolist(), *random_ids(30, 7).tolist()], [(8, 48)])
    prefilled = session.prefill(longer, Reuse())
    assert prefilled.layout.exact == len(prompt)
    truth = forward(session.model.hf, longer.token_ids).logits[-1]
    assert_near(prefilled.logits, truth, rounding(session.model.hf, len(longer)))


KEEPERS: list[Policy] = [
    Dense(),
    Prefix(),
    Prefix(windows="decode"),
    Prefix(windows="all"),
    Duo(),
    QuestionDrop(),
    CacheBlend(),
    RedKnot(dense_until=0, mass=0.1, recent=0),
]


@pytest.mark.parametrize("segments", [(), (40, 33)])
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("policy", KEEPERS, ids=lambda policy: policy.describe())
def test_whatever_a_policy_leaves_as_exact_is_what_dense_computes(
    policy: Policy, segments: tuple[int, ...], warm: bool
) -> None:
    """Windows, skipped FFNs and reused state must never pass for exact."""
    session, prompt = lively_session(), spanned(*segments)
    hf = session.model.hf
    if warm:
        session.build_missing(prompt)
    scores = torch.rand(4, 2, generator=torch.Generator().manual_seed(0))
    head_map = HeadMap.from_scores(scores, global_share=0.3, window=5, sink=1)
    session.prefill(prompt, policy, head_map)
    found = session.beginnings.find(prompt.token_ids)
    if found is None:
        return
    shared = found.tokens
    other = Prompt.of_ids([*prompt.token_ids[:shared].tolist(), *random_ids(9, 5).tolist()], [])
    prefilled = session.prefill(other, Prefix())
    assert prefilled.layout.exact == shared
    truth = forward(hf, other.token_ids)
    bound = rounding(hf, len(other))
    assert_near(prefilled.logits, truth.logits[-1], bound)
    for layer, (keys, values) in enumerate(zip(truth.keys, truth.values, strict=True)):
        found = prefilled.cache.read(layer, torch.arange(len(other)))
        assert_near(found[0], keys, bound)
        assert_near(found[1], values, bound)
