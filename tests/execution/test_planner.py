"""The planner never runs a policy that it predicts to lose."""

from dataclasses import replace

import pytest
import torch
from tests.execution.eager import lively_session, spanned

from redknot.execution import planner
from redknot.execution.planner import WORTH, Decision, Planner, calibrate
from redknot.execution.session import Session
from redknot.heads import HeadMap
from redknot.recovery import Layout
from redknot.recovery.cost import Rates
from redknot.recovery.policies import Dense, Duo, Prefix, parse_policy

RATES = Rates(matmul=1e9, causal=1e9, gathered=1e9, relocate=1e12, layer_overhead=0.0)
POLICIES = ["reuse", "epic:k=16", "question_drop", "layer_drop", "cacheblend", "redknot:mass=0"]


def layout(session: Session, *, stored: bool = True) -> Layout:
    prompt = spanned(300, 200)
    if stored:
        session.build_missing(prompt)
    return session.look_up(prompt).layout


def decide(
    monkeypatch: pytest.MonkeyPatch, rates: Rates, policy: str, *, stored: bool = True
) -> Decision:
    monkeypatch.setattr(planner, "calibrate", lambda executor: rates)
    session = lively_session()
    one = Planner(session.executor)
    return one.decide(layout(session, stored=stored), parse_policy(policy), None)


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_stored_is_dense(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = decide(monkeypatch, RATES, policy, stored=False)
    assert found.policy == Dense()
    assert "stored" in found.reason
    assert found.predicted is None


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "rates",
    [
        RATES,
        replace(RATES, layer_overhead=1.0),
        replace(RATES, relocate=1e3),
        replace(RATES, gathered=1e5),
        replace(RATES, matmul=1e6),
        replace(RATES, matmul=1e15, causal=1e15, gathered=1e15, layer_overhead=1e-6),
    ],
)
def test_no_policy_runs_that_is_predicted_to_lose(
    policy: str, rates: Rates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PF-02."""
    found = decide(monkeypatch, rates, policy)
    pays = found.predicted <= WORTH * found.predicted_dense
    assert found.policy == (parse_policy(policy) if pays else Dense())
    if not pays:
        assert f"{found.predicted:.3f} s" in found.reason
        assert f"{found.predicted_dense:.3f} s" in found.reason


def test_the_verdict_follows_the_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted work favours reuse; a question pass loses where only overhead counts."""
    assert decide(monkeypatch, RATES, "question_drop").policy != Dense()
    overhead = replace(RATES, layer_overhead=1e6)
    assert decide(monkeypatch, overhead, "question_drop").policy == Dense()
    found = decide(monkeypatch, overhead, "question_drop")
    assert found.predicted == pytest.approx(2 * found.predicted_dense, rel=1e-3)  # two passes


def test_a_policy_without_segments_runs_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "calibrate", lambda executor: pytest.fail("nothing to predict"))
    session = lively_session()
    one = Planner(session.executor)
    for policy in (Dense(), Prefix(), Duo()):
        assert one.decide(layout(session), policy, None).policy == policy


def test_calibration_happens_once_and_measures_rates() -> None:
    session = lively_session()
    one = Planner(session.executor)
    assert one.calibrate() is one.calibrate()
    rates = calibrate(session.executor)
    for name in ("matmul", "causal", "gathered", "relocate"):
        assert getattr(rates, name) > 1e6
    assert 0 < rates.layer_overhead < 1


def test_prompts_that_hardly_differ_are_predicted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 3 % in every count; what else decides is never left out."""
    monkeypatch.setattr(planner, "calibrate", lambda executor: RATES)
    monkeypatch.setattr(planner, "MOST_KNOWN", 6)
    session, counted = lively_session(), []
    one, found = Planner(session.executor), layout(session)
    real = Planner._count

    def counting(self: Planner, *asked: object) -> float:
        counted.append(asked)
        return real(self, *asked)

    monkeypatch.setattr(Planner, "_count", counting)

    def news(seen: Layout, policy: str = "reuse", head_map: HeadMap | None = None) -> int:
        before = len(counted)
        one.decide(seen, parse_policy(policy), head_map)
        return len(counted) - before

    assert news(found) == 2  # the policy and dense
    assert news(found) == news(replace(found, num_tokens=found.num_tokens + 1)) == 0
    assert news(replace(found, num_tokens=2 * found.num_tokens)) == 2
    assert news(found, "epic:k=16") == 1
    assert (
        news(found, head_map=HeadMap.from_scores(torch.rand(4, 2), global_share=0.5, window=8)) == 1
    )
    assert news(replace(found, probe=(0, 20))) == 2
    assert len(one._known) == 6  # the oldest went
    assert news(found, "reuse") == 2
