"""Distances are zero for dense itself, answers are plain greedy decoding."""

import pytest
import torch
from tests.execution.eager import lively_session, spanned
from tests.tiny import random_ids

from redknot.evaluation.fidelity import fidelity, reference
from redknot.execution import Prefilled
from redknot.execution.session import Session
from redknot.recovery.policies import parse_policy
from redknot.segments import Prompt

MAX_TOKENS = 12
POLICIES = ["reuse", "epic:k=4", "question_drop", "cacheblend", "question:share=0"]


def prefilled(session: Session, prompt: Prompt, policy: str) -> Prefilled:
    session.build_missing(prompt)
    return session.prefill(prompt, parse_policy(policy), room=2 * MAX_TOKENS)


def plain_greedy(session: Session, start: Prefilled, ends: frozenset[int]) -> list[int]:
    tokens = [int(start.logits.argmax())]
    while len(tokens) < MAX_TOKENS and tokens[-1] not in ends:
        tokens.append(int(session.executor.extend(start, torch.tensor(tokens[-1:]))[-1].argmax()))
    return tokens


def test_dense_is_at_no_distance_from_itself() -> None:
    session, prompt, ends = lively_session(), spanned(60, 50), frozenset[int]()
    dense, again = (prefilled(session, prompt, "dense") for _ in range(2))
    ref = reference(session.executor, dense, random_ids(5), ends, MAX_TOKENS)
    for one in (dense, again):
        found = fidelity(session.executor, one, ref, ends, MAX_TOKENS)
        assert (found.kl, found.gold_nll_change) == (0, 0)
        assert (found.agreement, found.top1, found.top10) == (1, 1, 1)
        assert found.answer == tuple(ref.answer.tolist())


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policys_answer_is_greedy_decoding_from_its_own_state(policy: str) -> None:
    session, prompt, ends = lively_session("llama"), spanned(60, 50), frozenset[int]()
    dense = prefilled(session, prompt, "dense")
    ref = reference(session.executor, dense, random_ids(5), ends, MAX_TOKENS)
    assert ref.answer.tolist() == plain_greedy(session, dense, ends)
    one = prefilled(session, prompt, policy)
    found = fidelity(session.executor, one, ref, ends, MAX_TOKENS)
    assert found.answer == tuple(plain_greedy(session, one, ends))


def test_an_end_token_ends_the_answer_and_belongs_to_it() -> None:
    session, prompt = lively_session(), spanned(60, 50)
    dense = prefilled(session, prompt, "dense")
    free = plain_greedy(session, prefilled(session, prompt, "dense"), frozenset())
    ends = frozenset({free[3]})
    ref = reference(session.executor, dense, random_ids(5), ends, MAX_TOKENS)
    assert ref.answer.tolist() == free[: free.index(free[3]) + 1]
    found = fidelity(session.executor, prefilled(session, prompt, "reuse"), ref, ends, MAX_TOKENS)
    own = plain_greedy(session, prefilled(session, prompt, "reuse"), ends)
    assert found.answer == tuple(own)


def test_measuring_leaves_the_prompt_as_it_was() -> None:
    session, prompt, ends = lively_session(), spanned(60, 50), frozenset[int]()
    dense, other = (prefilled(session, prompt, name) for name in ("dense", "reuse"))
    before = [one.cache.length for one in (dense, other)]
    assert before == [len(prompt)] * 2
    ref = reference(session.executor, dense, random_ids(5), ends, MAX_TOKENS)
    first = fidelity(session.executor, other, ref, ends, MAX_TOKENS)
    assert [one.cache.length for one in (dense, other)] == before
    assert fidelity(session.executor, other, ref, ends, MAX_TOKENS) == first


def test_distances_equal_their_definitions() -> None:
    session, prompt, ends = lively_session(), spanned(60, 50), frozenset[int]()
    dense, other = (prefilled(session, prompt, name) for name in ("dense", "reuse"))
    gold = random_ids(5)
    ref = reference(session.executor, dense, gold, ends, MAX_TOKENS)
    found = fidelity(session.executor, other, ref, ends, 0)
    assert found.answer == ()

    def along(start: Prefilled, tokens: torch.Tensor) -> torch.Tensor:
        rows = [start.logits, *session.executor.extend(start, tokens)[:-1]]
        start.cache.truncate(len(prompt))
        return torch.stack(rows).double().log_softmax(-1)

    p, q = along(dense, ref.answer), along(other, ref.answer)
    eps = 64 * torch.finfo(torch.float32).eps  # of log-probabilities up to 32 in size, twice
    kl = (p.exp() * (p - q)).sum(-1).mean()
    assert found.kl == pytest.approx(float(kl), abs=eps)
    assert found.agreement == pytest.approx(float((q.argmax(-1) == ref.answer).double().mean()))
    nll = [-along(one, gold).gather(1, gold[:, None]).mean() for one in (other, dense)]
    assert found.gold_nll_change == pytest.approx(float(nll[0] - nll[1]), abs=eps)
    best = [set(one[0].topk(10).indices.tolist()) for one in (p, q)]
    assert found.top10 == pytest.approx(len(best[0] & best[1]) / 10)
