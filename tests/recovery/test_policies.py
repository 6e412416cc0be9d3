"""What policies do, through executed plans: which tokens flow, run the FFN and publish."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import pytest
import torch
from tests.tiny import tiny_model
from torch import Tensor

from redknot.execution import Prefilled
from redknot.execution.session import Session
from redknot.execution.visibility import global_groups
from redknot.heads import HeadMap
from redknot.recovery import Plan, Policy, Stage, Windows
from redknot.recovery.policies import (
    POLICIES,
    CacheBlend,
    Dense,
    Duo,
    Epic,
    LayerDrop,
    Question,
    QuestionDrop,
    RedKnot,
    Reuse,
    parse_policy,
)
from redknot.segments import Prompt

MODEL = tiny_model(add_bos=True)
SCORES = torch.rand(4, 2, generator=torch.Generator().manual_seed(4))
HEAD_MAP = HeadMap.from_scores(SCORES, global_share=0.5, window=32, sink=4)
OPTIONS: dict[str, dict[str, Any]] = {
    "epic": {"k": 8},
    "redknot": {"dense_until": 1, "recent": 8},
    "cacheblend": {"share": 0.3},
}


def prepared(times: int = 8, build: bool = True) -> tuple[Session, Prompt]:
    session = Session(MODEL)
    documents = ["alpha " * times, "beta, " * times, "gamma " * times]
    prompt = session.tokeniser.prompt(documents, "which one?")
    if build:
        session.build_missing(prompt)
    return session, prompt


def executed(policy: Policy, times: int = 8) -> Prefilled:
    session, prompt = prepared(times)
    return session.prefill(prompt, policy, HEAD_MAP)


def contained(inner: Tensor, outer: Tensor) -> bool:
    return bool(torch.isin(inner, outer).all())


def skipped_tokens(plan: Plan) -> int:
    """FFN rows left out, over all layers."""
    return sum(len(layer.active) - len(layer.ffn) for layer in plan.layers if layer.ffn is not None)


@pytest.mark.parametrize("warm", [False, True], ids=["first", "prefix known"])
@pytest.mark.parametrize("name", POLICIES)
def test_sets_only_shrink_and_new_tokens_always_flow(name: str, warm: bool) -> None:
    session, prompt = prepared()
    if warm:
        session.prefill(prompt, Dense())
    done = session.prefill(prompt, POLICIES[name](**OPTIONS.get(name, {})), HEAD_MAP)
    stored = torch.cat([torch.arange(span.start, span.stop) for span in prompt.spans])
    new = torch.arange(done.layout.exact, len(prompt))
    new = new[~torch.isin(new, stored)]
    assert (done.layout.exact > 0) == (warm and POLICIES[name].takes_exact)
    before = torch.arange(done.layout.exact, len(prompt))
    for layer in done.plan.layers:
        assert torch.equal(layer.active, layer.active.unique())  # sorted, none twice
        assert contained(layer.active, before)
        assert contained(new, layer.active)
        assert int(layer.active[-1]) == len(prompt) - 1
        assert layer.ffn is None or contained(layer.ffn, layer.active)
        before = layer.active


@pytest.mark.parametrize("name", [*POLICIES, "redknot:signal=question:dense_until=1"])
def test_a_prompt_of_which_nothing_is_known_is_computed_whole(name: str) -> None:
    session, prompt = prepared(build=False)
    policy = replace(parse_policy(name), windows=Windows.NONE, **OPTIONS.get(name, {}))
    done = session.prefill(prompt, policy, HEAD_MAP)
    assert all(len(layer.active) == len(prompt) for layer in done.plan.layers)
    assert torch.equal(done.logits, Session(MODEL).prefill(prompt, Dense()).logits)


@pytest.mark.parametrize("name", [name for name, kind in POLICIES.items() if kind.takes_segments])
@pytest.mark.parametrize("probe", [None, (0, 20)], ids=["nothing asks", "question first"])
def test_the_last_token_flows_though_a_stored_segment_ends_with_it(
    name: str, probe: tuple[int, int] | None
) -> None:
    session, ids = Session(MODEL), [256, *range(97, 157)]
    prompt = Prompt.of_ids(ids, [(20, 40), (40, 61)], probe)
    session.build_missing(prompt)
    done = session.prefill(prompt, POLICIES[name](**OPTIONS.get(name, {})), HEAD_MAP)
    assert len(done.layout.segments) == 2
    assert all(int(layer.active[-1]) == 60 for layer in done.plan.layers)
    assert bool(done.logits.isfinite().all())


@pytest.mark.parametrize(
    "policy",
    [
        Question(share=1.0),
        QuestionDrop(first=1.0, then=1.0, windows=Windows.NONE),
        LayerDrop(then=1.0),
        CacheBlend(share=1.0),
        Epic(k=10**6),
        RedKnot(dense_until=4, publish_all=True, windows=Windows.NONE),
        RedKnot(dense_until=0, mass=1.0, publish_all=True, windows=Windows.NONE),
        Duo(windows=Windows.NONE),
    ],
    ids=lambda policy: policy.describe(),
)
def test_the_neutral_value_is_dense_bit_for_bit(policy: Policy) -> None:
    assert torch.equal(executed(policy).logits, executed(Dense()).logits)


@pytest.mark.parametrize(
    "policy",
    [Question(share=0.0), QuestionDrop(first=0.0, then=0.0, windows=Windows.NONE), Epic(k=0)],
    ids=lambda policy: policy.describe(),
)
def test_a_share_of_zero_is_reuse(policy: Policy) -> None:
    done, reuse = executed(policy), executed(Reuse())
    assert done.plan.differs(reuse.plan) == []
    assert torch.equal(done.logits, reuse.logits)
    assert not torch.equal(done.logits, executed(Dense()).logits)


@dataclass(frozen=True, kw_only=True)
class Thinning(Policy):
    """A user's own: every ``step``-th stored token, then every ``step``-th of those."""

    step: int = 2

    name: ClassVar = "thinning"

    def keep(self, stage: Stage) -> Tensor:
        return stage.active[:: self.step] if stage.layer in (0, 2) else stage.active


def test_a_policy_of_the_users_own_works() -> None:
    done, dense = executed(Thinning(step=3)), executed(Dense())
    stored = done.layout.stored
    for layer, kept in enumerate((stored[::3], stored[::3], stored[::9], stored[::9])):
        rows = done.plan.layers[layer].active
        assert torch.equal(rows[torch.isin(rows, stored)], kept)
    assert done.plan.policy == "thinning:step=3"
    assert done.flops_share < 1
    assert torch.equal(executed(Thinning(step=1)).logits, dense.logits)


@pytest.mark.parametrize(
    "returned",
    [
        lambda layout: layout.stored,
        lambda layout: layout.fresh[:1],
        lambda layout: layout.stored[:2].repeat(2),
        lambda layout: torch.tensor([10**6]),
    ],
    ids=["left before", "never stored", "twice", "beyond the prompt"],
)
def test_a_policy_that_brings_tokens_back_is_refused(returned: Any) -> None:
    class Rising(Policy):
        def keep(self, stage: Stage) -> Tensor:
            return stage.active[:2] if stage.layer == 0 else returned(stage.layout)

    with pytest.raises(ValueError, match="not active at layer 1"):
        executed(Rising())


def test_a_policy_without_the_signals_it_reads_is_refused() -> None:
    class Undeclared(Question):
        uses_probe: ClassVar = False

    with pytest.raises(ValueError, match="uses_probe"):
        executed(Undeclared())


@pytest.mark.parametrize("name", ["duo", "redknot"])
def test_a_policy_of_head_classes_needs_a_head_map(name: str) -> None:
    session, prompt = prepared()
    with pytest.raises(ValueError, match="needs a head map"):
        session.prefill(prompt, POLICIES[name]())


def test_deep_ffns_are_skipped_in_a_long_prompt_and_never_in_dense() -> None:
    policy = RedKnot(dense_until=1, recent=8)
    done = executed(policy, times=40)
    assert done.plan.num_tokens >= 600
    assert done.plan.layers[0].ffn is None
    assert skipped_tokens(done.plan) > 0
    assert done.flops.ffn < executed(Dense(), times=40).flops.ffn
    for other in (Dense(), RedKnot(dense_until=4)):
        assert skipped_tokens(executed(other, times=40).plan) == 0


@pytest.mark.parametrize("signal", ["output", "question"])
def test_new_and_recent_tokens_always_run_the_ffn(signal: Literal["output", "question"]) -> None:
    done = executed(RedKnot(dense_until=1, recent=8, mass=0.0, share=0.0, signal=signal))
    always = torch.cat([done.layout.fresh, done.layout.stored[-8:]]).sort().values
    assert all(torch.equal(layer.ffn, always) for layer in done.plan.layers[1:-1])


@pytest.mark.parametrize("publish_all", [False, True])
@pytest.mark.parametrize("guard", [False, True])
def test_fresh_state_is_published_where_the_recipe_says(guard: bool, publish_all: bool) -> None:
    policy = RedKnot(dense_until=1, recent=8, guard=guard, publish_all=publish_all)
    done = executed(policy)
    groups = global_groups([layer.shape for layer in MODEL.adapter.layers], HEAD_MAP)
    skipped, held_back = set(), 0
    for index, layer in enumerate(done.plan.layers):
        assert layer.publish is not None
        for group, row in enumerate(layer.publish.tolist()):
            for token, published in zip(layer.active.tolist(), row, strict=True):
                new = not bool(done.layout.reusable[token])
                guarded = guard and token in skipped
                chosen = bool(groups[index, group]) or publish_all
                held_back += chosen and guarded
                assert published == (new or (chosen and not guarded))
        if layer.ffn is not None:
            skipped |= set(layer.active.tolist()) - set(layer.ffn.tolist())
    assert skipped
    assert (held_back > 0) == guard
