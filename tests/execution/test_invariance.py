"""Repeats, chunks, blocks of rows and processes change nothing but rounding."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from tests.execution.eager import (
    assert_near,
    build_state,
    far,
    lively_hf,
    lively_session,
    rounding,
    spanned,
)
from tests.tiny import random_ids, tiny_session

from redknot.execution import ExecutionSettings
from redknot.execution.batch import DecodeBatch
from redknot.execution.turns import drained
from redknot.heads import HeadMap
from redknot.models import adapt
from redknot.recovery import Policy
from redknot.recovery.policies import (
    CacheBlend,
    Dense,
    Duo,
    Epic,
    Question,
    QuestionDrop,
    RedKnot,
    Reuse,
)

POLICIES: list[Policy] = [
    Dense(),
    Reuse(),
    Epic(k=10),
    Question(),
    QuestionDrop(),
    Duo(),
    CacheBlend(),
    RedKnot(dense_until=1, recent=8),
]
STATIC = [policy for policy in POLICIES if not policy.adaptive]
FIXED = [policy for policy in STATIC if not policy.uses_probe]  # no ranking that rounding may turn
PROMPT = spanned(61, 64, 50)


def some_map(layers: int = 4) -> HeadMap:
    """Half of the groups global, the others narrow."""
    scores = torch.rand(layers, 2, generator=torch.Generator().manual_seed(0))
    return HeadMap.from_scores(scores, global_share=0.5, window=20, decode_window=9)


def run(policy: Policy, settings: ExecutionSettings | None = None) -> tuple[torch.Tensor, ...]:
    """First logits and those of five appended tokens, with two of three segments stored."""
    session = lively_session("llama", settings=settings or ExecutionSettings())
    for span in PROMPT.spans[:2]:
        session.build(PROMPT.token_ids[span.start : span.stop])
    prefilled = session.prefill(PROMPT, policy, some_map(), room=5)
    return prefilled.logits, session.executor.extend(prefilled, random_ids(5, seed=8))


def assert_same_choice(logits: torch.Tensor, other: torch.Tensor, bound: float) -> None:
    """Equal greedy tokens, unless the two best are closer than rounding."""
    for row, peer in zip(logits.view(-1, 300), other.view(-1, 300), strict=True):
        best, second = row.topk(2).values
        if best - second > 2 * bound * row.abs().max():
            assert row.argmax() == peer.argmax()


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_a_repeat_is_bit_equal(policy: Policy) -> None:
    for first, second in zip(run(policy), run(policy), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_a_session_remembers_nothing_that_changes_a_repeat(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever its pages stand: those in order are read without a copy, which rounds otherwise."""
    monkeypatch.setattr("redknot.kernels.paging._stride", lambda pages: None)
    session = lively_session()
    session.build_missing(PROMPT)
    session.prefill(PROMPT, Dense())  # from here on the beginning is known exactly
    lookup = session.look_up(PROMPT)
    runs = [session.prefill(PROMPT, policy, some_map(), lookup=lookup) for _ in range(3)]
    others = spanned(40, 30, seed=4)
    session.prefill(others, policy, some_map())
    runs.append(session.prefill(PROMPT, policy, some_map()))
    for again in runs[1:]:
        assert torch.equal(runs[0].logits, again.logits)
        assert not runs[0].plan.differs(again.plan)


def scattered(seed: int, copied: bool) -> torch.Tensor:
    """Logits of a prompt and of tokens behind it, in pages of a random order; in order for 0."""
    session, prompt = lively_session(), spanned(400, 300)
    storage = session.executor.storage
    storage.grow(6000)
    if seed:
        pages = storage.pool.allocate(3000)
        storage.pool.free(np.random.default_rng(seed).permutation(pages)[:2500])
    lookup = session.look_up(prompt)
    turns = session.executor.prefilling(prompt.token_ids, lookup, Dense(), copied=copied)
    prefilled = drained(turns)
    batch = DecodeBatch(session.executor, 1, len(prompt) + 8, copied=copied)
    logits = [prefilled.logits.clone()]
    batch.add(prefilled)
    for token in random_ids(8, seed=5).tolist():
        logits.append(batch.step([token])[0].clone())
    return torch.stack(logits)


def test_what_is_read_by_copies_has_the_same_bits_wherever_its_pages_stand() -> None:
    """Views of pages in order round otherwise, which shows that the test can fail."""
    alone = scattered(0, copied=True)
    assert all(torch.equal(scattered(seed, copied=True), alone) for seed in (1, 2, 3))
    assert not torch.equal(scattered(1, copied=False), scattered(0, copied=False))


@pytest.mark.parametrize("chunk_tokens", [3, 64, 150, 1000])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_chunk_size_changes_nothing_but_rounding(policy: Policy, chunk_tokens: int) -> None:
    bound = rounding(lively_hf(), len(PROMPT) + 5)
    whole = run(policy)
    cut = run(policy, ExecutionSettings(chunk_tokens=chunk_tokens))
    for one, other in zip(whole, cut, strict=True):
        assert_near(other, one, bound)
        assert_same_choice(one, other, bound)


@pytest.mark.parametrize("row_block", [1, 50])
@pytest.mark.parametrize("policy", FIXED, ids=lambda policy: policy.name)
def test_block_size_of_rows_changes_nothing_but_rounding(policy: Policy, row_block: int) -> None:
    bound = rounding(lively_hf(), len(PROMPT) + 5)
    whole = run(policy)
    cut = run(policy, ExecutionSettings(row_block=row_block))
    for one, other in zip(whole, cut, strict=True):
        assert_near(other, one, bound)
        assert_same_choice(one, other, bound)


def test_policies_differ_by_more_than_rounding() -> None:
    """Else the tests above could not fail."""
    results = [run(policy)[0] for policy in (Dense(), Reuse(), QuestionDrop(), Duo())]
    bound = rounding(lively_hf(), len(PROMPT))
    for index, one in enumerate(results):
        assert all(far(one, other, bound) for other in results[:index])


def test_extending_at_once_or_token_by_token_is_the_same() -> None:
    session, new = lively_session(), random_ids(20, seed=2)
    bound = rounding(session.model.hf, len(PROMPT) + len(new))
    one = session.prefill(PROMPT, Duo(), some_map(), room=20)
    other = session.prefill(PROMPT, Duo(), some_map(), room=20)
    at_once = session.executor.extend(one, new)
    steps = torch.cat([session.executor.extend(other, token[None]) for token in new])
    assert_near(steps, at_once, bound)


@pytest.mark.parametrize("chunk_tokens", [7, 130])
@pytest.mark.parametrize("policy", STATIC, ids=lambda policy: policy.name)
def test_chunks_execute_the_same_plan(policy: Policy, chunk_tokens: int) -> None:
    plans = []
    for size in (None, chunk_tokens):
        session = lively_session(settings=ExecutionSettings(chunk_tokens=size))
        for span in PROMPT.spans[:2]:
            session.build(PROMPT.token_ids[span.start : span.stop])
        plans.append(session.prefill(PROMPT, policy, some_map()).plan)
    assert not plans[0].differs(plans[1])


SCRIPT = """
from tests.tiny import random_ids, tiny_session
session = tiny_session(add_bos=True)
print(session.namespace.key("segment", random_ids(40)).hex())
"""


def test_keys_are_the_same_in_another_process_with_another_hash_seed() -> None:
    here = tiny_session(add_bos=True).namespace.key("segment", random_ids(40)).hex()
    environment = {"PYTHONHASHSEED": "1234", "PYTHONPATH": ":".join(sys.path), "PATH": ""}
    there = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True
    )
    assert there.stdout.strip() == here


def test_building_state_is_repeatable_and_independent_of_the_loaded_copy() -> None:
    states = [build_state(adapt(lively_hf()), random_ids(90), (256,)) for _ in range(2)]
    for plane in ("key", "value"):
        assert torch.equal(states[0].planes[plane], states[1].planes[plane])
