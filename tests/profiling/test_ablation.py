"""Ablation equals windowing one group alone in an independent forward pass."""

import pytest
import torch
from tests.execution.eager import (
    EPS,
    FAMILIES,
    forward,
    lively_hf,
    lively_session,
    rounding,
    spanned,
)
from tests.tiny import random_ids
from torch import Tensor
from transformers import PreTrainedModel

from redknot.execution.session import Session
from redknot.kernels.attend import Reach
from redknot.models.byte_tokenizer import byte_tokenizer
from redknot.models.loading import wrap_model
from redknot.profiling.ablation import Observation, observe
from redknot.profiling.shift import prefix_shift
from redknot.recovery.policies import Dense
from redknot.segments import Prompt

ANSWER = 5
REACH = Reach(12, 3)


def observed(session: Session, prompt: Prompt, answer: Tensor, reach: Reach) -> Observation:
    end = prompt.spans[-1].stop
    dense = session.prefill(prompt, Dense())
    tail = torch.cat([prompt.token_ids[end:], answer[:-1]])
    context = dense.cache.first(end)
    return observe(session.model.adapter, context, tail, len(answer), reach)


def alone(hf: PreTrainedModel, ids: Tensor, border: int, layer: int, group: int) -> Tensor:
    """Logits where rows from ``border`` on see sink and window in one group of one layer."""

    def mask(index: int, p: Tensor, j: Tensor) -> Tensor:
        seen = torch.ones(hf.config.num_key_value_heads, *(p - j).shape, dtype=torch.bool)
        if index == layer:
            seen[group] = (p < border) | (j < REACH.sink) | (j > p - REACH.window)
        return seen

    return forward(hf, ids, mask).logits[-ANSWER:].log_softmax(-1)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_groups_score_is_the_kl_of_windowing_it_alone(name: str) -> None:
    hf = lively_hf(name)
    session = Session(wrap_model(hf, byte_tokenizer(add_bos=True)))
    prompt, answer = spanned(40, 30, question=9), random_ids(ANSWER, seed=5)
    ids, border = torch.cat([prompt.token_ids, answer[:-1]]), prompt.spans[-1].stop
    found = observed(session, prompt, answer, REACH).ablation
    whole = forward(hf, ids).logits[-ANSWER:]
    dense = whole.log_softmax(-1)
    e = rounding(hf, len(ids)) * float(whole.abs().max())  # of a logit
    assert found.shape == (hf.config.num_hidden_layers, hf.config.num_key_value_heads)
    clear = []
    for layer, scores in enumerate(found):
        for group, score in enumerate(scores):
            windowed = alone(hf, ids, border, layer, group)
            gap = dense - windowed
            kl = (dense.exp() * gap).sum(-1, keepdim=True)
            # The KL's slopes by the logits of both sides are q - p and p (gap - KL).
            slopes = (windowed.exp() - dense.exp()).abs() + dense.exp() * (gap - kl).abs()
            bound = e * float(slopes.sum(-1).mean()) + 4 * e**2
            assert abs(float(score) - float(kl.mean())) <= bound
            clear.append(float(kl.mean()) > 2 * bound)
    assert 2 * sum(clear) >= len(clear), "too few groups matter for the test to see anything"


def test_a_reach_wider_than_the_prompt_costs_nothing() -> None:
    session, prompt = lively_session(), spanned(40, 30, question=9)
    answer = random_ids(ANSWER, seed=5)
    found = observed(session, prompt, answer, Reach(len(prompt) + ANSWER, 0))
    logits = forward(session.model.hf, prompt.token_ids).logits
    e = rounding(session.model.hf, len(prompt) + ANSWER) * float(logits.abs().max())
    size = EPS * float(logits.log_softmax(-1).abs().max())  # of a rounded log-probability
    assert float(found.ablation.abs().max()) <= 4 * e**2 + 4 * size
    assert not found.edge.any()


@pytest.mark.parametrize("name", ["llama", "llama-9/3", "qwen2-14/2-1"])
def test_edge_mass_is_what_lies_outside_sink_and_window(name: str) -> None:
    session, prompt, answer = lively_session(name), spanned(40, 30), random_ids(ANSWER, seed=5)
    edges = [observed(session, prompt, answer, Reach(window, 0)).edge for window in (2, 12, 60)]
    for edge in edges:
        assert bool(((edge >= 0) & (edge <= 1 + rounding(session.model.hf, 120))).all())
    assert bool((edges[0] > edges[1]).all())
    assert bool((edges[1] > edges[2]).all())
    sinks = observed(session, prompt, answer, Reach(2, 20)).edge
    assert bool((sinks < edges[0]).all())


def test_the_union_over_heads_is_no_smaller_than_one_head() -> None:
    session, prompt, answer = lively_session(), spanned(40, 30), random_ids(ANSWER, seed=5)
    found = observed(session, prompt, answer, REACH)
    assert bool((found.important_per_head > 0).all())
    assert bool((found.important >= found.important_per_head).all())
    assert bool((found.important <= 1).all())


@pytest.mark.parametrize("name", ["llama", "qwen2-14/2-1", "qwen3-yarn"])
def test_prefix_shift_is_nothing_for_a_document_right_behind_the_anchor(name: str) -> None:
    session, anchor = lively_session(name), (256,)
    ids = [*anchor, *random_ids(90).tolist()]
    # Attention weights are off by `rounding`; one minus a cosine adds a sum over rows and tokens.
    bound = rounding(session.model.hf, 91) + 32 * 50 * EPS
    first = prefix_shift(session.model.adapter, Prompt.of_ids(ids, [(1, 51)]), anchor)
    assert float(first.abs().max()) <= bound
    later = prefix_shift(session.model.adapter, Prompt.of_ids(ids, [(21, 71)]), anchor)
    assert float(later.max()) > 10 * bound
