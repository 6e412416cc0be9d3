"""Counted FLOPs of executed plans against PyTorch's own counter, and predicted row counts."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from tests.tiny import tiny_model
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from redknot.execution import ExecutionSettings, Prefilled
from redknot.execution.session import Session
from redknot.execution.visibility import global_groups
from redknot.heads import HeadMap, visible_pairs
from redknot.kernels.attend import Reach
from redknot.models import LoadedModel
from redknot.recovery import Plan, Policy, Windows, plan_flops
from redknot.recovery.flops import probe_rows
from redknot.recovery.policies import POLICIES, Dense
from redknot.recovery.selection import simulate
from redknot.segments import Prompt, PromptTemplate

LAYERS, VOCABULARY = 3, 300
CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
DOCUMENTS = ["first text", "a second", "third one"]
OPTIONS: dict[str, dict[str, Any]] = {
    "epic": {"k": 4},
    "redknot": {"dense_until": 1, "recent": 4},
    "cacheblend": {"share": 0.3},
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 12},
    "qwen3": {"heads": (9, 3)},
}


@cache
def model(family: str) -> LoadedModel:
    return tiny_model(family, add_bos=True, layers=LAYERS, **FAMILIES[family])


def prepared(family: str = "llama", *, question_first: bool = False) -> tuple[Session, Prompt]:
    """A session that has the documents' state, and where each attention call has one row."""
    template = PromptTemplate(
        instruction="", document="{text}\n", answer="", question_first=question_first
    )
    session = Session(model(family), template, settings=ExecutionSettings(row_block=1))
    prompt = session.tokeniser.prompt(DOCUMENTS, "which?")
    assert session.build_missing(prompt) == len(DOCUMENTS)
    return session, prompt


def random_map(groups: int) -> HeadMap:
    scores = torch.rand(LAYERS, groups, generator=torch.Generator().manual_seed(4))
    return HeadMap.from_scores(scores, global_share=0.5, window=8, sink=4)


def policy_of(name: str, windows: Windows = Windows.NONE) -> Policy:
    return POLICIES[name](windows=windows, **OPTIONS.get(name, {}))


def counter() -> FlopCounterMode:
    """PyTorch's counter; its table lacks only the CPU's own attention."""

    def attention_flops(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
        return sdpa_flop_count(q, k, v)

    return FlopCounterMode(display=False, custom_mapping={CPU_ATTENTION: attention_flops})


def counted(session: Session, prompt: Prompt, policy: Policy) -> tuple[int, Prefilled]:
    """What PyTorch counts while ``policy`` runs."""
    head_map = random_map(session.executor.shapes[0].num_groups)
    with counter() as counting:
        prefilled = session.prefill(prompt, policy, head_map)
    return counting.get_total_flops(), prefilled


def output_head(session: Session) -> int:
    """FLOPs of one row's logits, which `plan_flops` leaves out."""
    return 2 * session.model.hf.config.hidden_size * VOCABULARY


def expected(session: Session, prefilled: Prefilled) -> int:
    """`plan_flops` in the counter's terms.

    The counter knows no element-wise relocation, but the output head, and the scores of the
    question pass as whole matrices, from the first key that any probe row sees to the last.
    """
    plan, layout, sight = prefilled.plan, prefilled.layout, prefilled.sight
    shapes = session.executor.shapes
    flops = plan_flops(plan, layout, shapes, sight.prefill, sight.decode)
    scores = 0
    for shape in shapes if plan.probe_rows else ():
        rows, reach = probe_rows(layout), Reach(horizon=shape.horizon)
        oldest = 0 if shape.horizon is None else max(0, int(rows[0]) - shape.horizon + 1)
        unseen = len(rows) * (int(rows[-1]) + 1 - oldest) - visible_pairs(rows, reach)
        scores += unseen * shape.num_groups * shape.attention_pair_flops // 2
    return flops.total - flops.relocation + output_head(session) + scores


@pytest.mark.parametrize("windows", [Windows.NONE, Windows.ALL])
@pytest.mark.parametrize("name", POLICIES)
def test_flops_are_what_the_counter_counts(name: str, windows: Windows) -> None:
    session, prompt = prepared()
    total, prefilled = counted(session, prompt, policy_of(name, windows))
    assert total == expected(session, prefilled)
    assert (prefilled.plan.probe_rows > 0) == policy_of(name).uses_probe


@pytest.mark.parametrize("name", ["prefix", "reuse", "question_drop", "redknot"])
def test_flops_behind_a_known_prefix_are_counted(name: str) -> None:
    session, prompt = prepared()
    session.prefill(prompt, Dense())  # leaves the exact state of what stands before the documents
    total, prefilled = counted(session, prompt, policy_of(name, Windows.CONTEXT))
    assert prefilled.layout.exact == prompt.spans[0].start
    assert total == expected(session, prefilled)


@pytest.mark.parametrize("name", ["question", "layer_drop"])
def test_flops_of_a_copied_probe_are_counted(name: str) -> None:
    session, prompt = prepared(question_first=True)
    total, prefilled = counted(session, prompt, policy_of(name, Windows.ALL))
    assert not prefilled.layout.probe_follows_context
    assert total == expected(session, prefilled)


@pytest.mark.parametrize("name", ["dense", "epic", "question_drop"])
@pytest.mark.parametrize("family", ["mistral", "qwen3"])
def test_flops_of_other_families_are_counted(family: str, name: str) -> None:
    session, prompt = prepared(family)
    total, prefilled = counted(session, prompt, policy_of(name, Windows.ALL))
    assert total == expected(session, prefilled)


def test_dense_flops_are_those_of_the_unmodified_model() -> None:
    session, prompt = prepared()
    dense, hf = session.prefill(prompt, Dense()).dense_flops, session.model.hf
    with torch.inference_mode(), counter() as counting:
        hf(prompt.token_ids[None], use_cache=False, logits_to_keep=1)
    counts = counting.get_flop_counts()["Global"]
    attention = counts.pop(CPU_ATTENTION)
    assert sum(counts.values()) == dense.projection + dense.ffn + output_head(session)
    # the counter takes causal attention as a square, of which (n + 1) / 2n is visible
    assert attention * (len(prompt) + 1) == dense.attention * 2 * len(prompt)
    assert dense.relocation == 0


def test_a_known_prefix_counts_neither_for_those_who_take_it_nor_for_dense() -> None:
    session, prompt = prepared()
    first = session.prefill(prompt, Dense())
    dense, prefix = (session.prefill(prompt, policy_of(name)) for name in ("dense", "prefix"))
    assert (dense.layout.exact, prefix.layout.exact) == (0, prompt.spans[0].start)
    assert replace(prefix.flops, relocation=0) == dense.flops
    assert dense.flops.total < first.flops.total
    assert dense.dense_flops == prefix.dense_flops
    assert dense.dense_flops.total < first.dense_flops.total


def row_counts(plan: Plan) -> list[tuple[int, int, int]]:
    return [
        (len(layer.active), len(layer.active if layer.ffn is None else layer.ffn), layer.ranked)
        for layer in plan.layers
    ]


STATIC = [name for name, kind in POLICIES.items() if not kind.adaptive]


@pytest.mark.parametrize("name", [*STATIC, "cacheblend"])  # adaptive, but its counts are fixed
def test_simulation_predicts_the_rows_of_executed_plans(name: str) -> None:
    session, prompt = prepared()
    policy, head_map = policy_of(name), random_map(2)
    executed = session.prefill(prompt, policy, head_map)
    groups = global_groups(session.executor.shapes, head_map)
    predicted = simulate(policy, executed.layout, LAYERS, groups)
    assert row_counts(predicted) == row_counts(executed.plan)
    assert predicted.probe_rows == executed.plan.probe_rows
    flops = plan_flops(
        predicted,
        executed.layout,
        session.executor.shapes,
        executed.sight.prefill,
        executed.sight.decode,
    )
    assert (flops.projection, flops.ffn) == (executed.flops.projection, executed.flops.ffn)
