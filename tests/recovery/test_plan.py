"""Plans as data: saved, read, compared and replayed."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tiny import tiny_model

from redknot.errors import InputError
from redknot.execution.session import Session
from redknot.heads import HeadMap
from redknot.recovery import Plan, Policy
from redknot.recovery.policies import Dense, Replay, Reuse, parse_policy
from redknot.segments import Prompt

MODEL = tiny_model(add_bos=True)
HEAD_MAP = HeadMap.from_scores(
    torch.rand(4, 2, generator=torch.Generator().manual_seed(4)),
    global_share=0.5,
    window=32,
    sink=4,
)
NAMES = [
    "dense",
    "reuse",
    "epic:k=8",
    "cacheblend:share=0.3",
    "question_drop",
    "layer_drop:windows=all",
    "duo",
    "redknot:dense_until=1:recent=8",
    "redknot:dense_until=1:recent=8:guard=true:signal=question",
]


def prepared() -> tuple[Session, Prompt]:
    session = Session(MODEL)
    prompt = session.tokeniser.prompt(["alpha " * 8, "beta " * 9, "gamma " * 7], "which one?")
    session.build_missing(prompt)
    return session, prompt


def reloaded(plan: Plan, path: Path) -> Plan:
    plan.save(path)
    return Plan.load(path)


@pytest.mark.parametrize("name", NAMES)
def test_a_saved_plan_is_read_back_equal(name: str, tmp_path: Path) -> None:
    session, prompt = prepared()
    plan = session.prefill(prompt, parse_policy(name), HEAD_MAP).plan
    loaded = reloaded(plan, tmp_path / "plan.json")
    assert loaded.differs(plan) == plan.differs(loaded) == []
    assert loaded.describe() == plan.describe()
    assert (loaded.policy, loaded.probe_rows) == (plan.policy, plan.probe_rows)
    assert [layer.ranked for layer in loaded.layers] == [layer.ranked for layer in plan.layers]


@pytest.mark.parametrize("name", NAMES)
def test_a_replayed_plan_gives_the_same_logits(name: str, tmp_path: Path) -> None:
    session, prompt = prepared()
    policy = parse_policy(name)
    lookup = session.look_up(prompt)  # both runs know the same
    made = session.prefill(prompt, policy, HEAD_MAP, lookup=lookup)
    replay = Replay(plan=reloaded(made.plan, tmp_path / "plan.json"), windows=policy.windows)
    again = session.prefill(prompt, replay, HEAD_MAP, lookup=lookup)
    assert torch.equal(again.logits, made.logits)
    assert again.plan.differs(made.plan) == []
    assert again.plan.probe_rows == 0


@pytest.mark.parametrize("name", ["dense", "reuse", "question_drop:windows=none"])
def test_a_plan_is_replayed_whatever_has_become_known_since(name: str) -> None:
    session, prompt = prepared()
    policy = parse_policy(name)
    made = session.prefill(prompt, policy, HEAD_MAP)
    assert session.look_up(prompt).layout.exact > 0
    again = session.prefill(prompt, Replay(plan=made.plan, windows=policy.windows), HEAD_MAP)
    assert again.plan.differs(made.plan) == []
    assert torch.equal(again.logits, made.logits)


def test_a_replay_on_another_prompt_is_refused() -> None:
    session, prompt = prepared()
    plan = session.prefill(prompt, Reuse()).plan
    other = session.tokeniser.prompt(["alpha " * 8], "which one?")
    session.build_missing(other)
    with pytest.raises(ValueError, match="another"):
        session.prefill(other, Replay(plan=plan))


def made(name: str) -> Plan:
    session, prompt = prepared()
    return session.prefill(prompt, parse_policy(name), HEAD_MAP).plan


def test_different_plans_differ_where_they_do() -> None:
    dense, drop = made("dense"), made("question_drop:first=1:then=0.2:until=0.5")
    assert [line.split(":")[0] for line in dense.differs(drop)] == ["layer 2", "layer 3"]
    gone = len(dense.layers[2].active) - len(drop.layers[2].active)
    assert dense.differs(drop)[0] == f"layer 2: -{gone} +0 active"
    assert drop.differs(dense)[0] == f"layer 2: -0 +{gone} active"


def test_a_difference_in_ffn_or_publication_alone_is_named() -> None:
    plan = made("redknot:dense_until=1:recent=8")
    first, second = plan.layers[:2]
    assert first.publish is not None
    changed = first.publish.clone()
    changed[0, 0] ^= True
    layers = (replace(first, publish=changed), replace(second, ffn=None), *plan.layers[2:])
    assert plan.differs(replace(plan, layers=layers)) == [
        "layer 0: -0 +0 active, ffn/kv",
        "layer 1: -0 +0 active, ffn/kv",
    ]


def test_plans_of_other_models_or_prompts_are_not_compared() -> None:
    plan = made("reuse")
    for other in (replace(plan, layers=plan.layers[:2]), replace(plan, num_tokens=7)):
        assert plan.differs(other) == ["plans of another model or prompt"]


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 2},
        {"polcy": "reuse"},
        {"num_tokens": "many"},
        {"row_sets": []},
        {"row_sets": [[[5, 3]]]},
        {"row_sets": [[[0, 10**6]]]},
        {"layers": [{"active": -1}]},
        {"layers": [{"active": 0, "fnn": 1}]},
    ],
)
def test_a_damaged_plan_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    made("reuse").save(path)
    path.write_text(json.dumps(json.loads(path.read_bytes()) | changes))
    with pytest.raises(InputError, match=r"plan\.json"):
        Plan.load(path)


@pytest.mark.parametrize("content", [None, b"", b"[]", b"{\x00"])
def test_what_is_no_plan_is_refused(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "plan.json").write_bytes(content)
    with pytest.raises(InputError, match=r"plan\.json"):
        Plan.load(tmp_path / "plan.json")


def test_a_plan_is_printed_layer_run_by_layer_run() -> None:
    plan = made("question_drop:first=1:then=0:until=0.5")
    lines = plan.describe().splitlines()
    assert lines[0].startswith(f"question_drop:first=1:then=0:until=0.5: {plan.num_tokens} tokens")
    assert [line.split(":")[0] for line in lines[1:]] == ["layers 0-1", "layers 2-3"]
    assert f"active {plan.num_tokens}," in lines[1]


def test_dense_has_no_rows_left_out() -> None:
    policy: Policy = Dense()
    session, prompt = prepared()
    plan = session.prefill(prompt, policy).plan
    assert all(torch.equal(layer.active, torch.arange(len(prompt))) for layer in plan.layers)
