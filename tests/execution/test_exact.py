"""Relocation, full recompute and canonical state are exact: only reuse is approximate."""

import pytest
import torch
from tests.execution.eager import (
    EPS,
    FAMILIES,
    assert_near,
    build_state,
    far,
    forward,
    lively_hf,
    lively_session,
    rounding,
    spanned,
)
from tests.tiny import random_ids
from transformers import DynamicCache, PreTrainedModel

from redknot.execution.cache import PromptCache
from redknot.models import adapt
from redknot.recovery import Policy
from redknot.recovery.policies import CacheBlend, Dense, Epic, LayerDrop, Question, QuestionDrop
from redknot.segments import Prompt

ANCHOR, SEGMENT = (256, 7, 9), random_ids(100, seed=1)
SCALED = ["llama-llama3", "llama-yarn", "llama-9/3-yarn", "qwen2-14/2-llama3", "qwen3-yarn"]


def hf_state(hf: PreTrainedModel, offset: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of the segment by layer, when anchor and segment run alone at ``offset``."""
    ids = torch.cat([torch.tensor(ANCHOR), SEGMENT])[None]
    with torch.inference_mode():
        out = hf.model(
            ids,
            position_ids=offset + torch.arange(ids.shape[1])[None],
            past_key_values=DynamicCache(),
            use_cache=True,
        )
    layers = out.past_key_values.layers
    return [
        (layer.keys[0, :, len(ANCHOR) :], layer.values[0, :, len(ANCHOR) :]) for layer in layers
    ]


def score_size(hf: PreTrainedModel) -> float:
    """Largest |q| |k| of any layer: how much a score moves for one radian."""
    ids = torch.cat([torch.tensor(ANCHOR), SEGMENT])
    keys = forward(hf, ids).keys
    # Queries and keys come from weights and norms of one distribution, so |q| is about |k|.
    return max(float(key.square().sum(-1).max()) for key in keys) * hf.config.head_dim**-0.5


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")
@pytest.mark.parametrize("offset", [0, 200, 700])
@pytest.mark.parametrize("name", FAMILIES)
def test_relocated_keys_are_those_of_a_run_at_the_new_place(name: str, offset: int) -> None:
    """Offset 200 takes the segment across original_max (256) of llama3 and yarn, 700 behind it."""
    hf = lively_hf(name)
    adapter = adapt(hf)
    state = build_state(adapter, SEGMENT, ANCHOR)
    start = offset + len(ANCHOR)
    cache = PromptCache.allocate(adapter, start + len(SEGMENT))
    cache.place(adapter, state, start, len(SEGMENT))
    # An angle at position p is off by half an ulp, p * eps / 2, in both runs: scores, and with them
    # the softmax, move by that times |q| |k|. Layer 0 has no attention before it.
    turned = EPS * (start + len(SEGMENT)) * score_size(hf)
    relocated = cache.first(start + len(SEGMENT))
    for layer, (keys, values) in enumerate(hf_state(hf, offset)):
        bound = rounding(hf, len(SEGMENT)) + layer * turned
        assert_near(relocated[1][layer, :, start:], values, bound)
        got = relocated[0][layer, :, start:]
        for pairs in ((0,), (1, 2, 3), (4, 5, 6, 7)):  # high, middle and low frequencies
            band = [*pairs, *(pair + hf.config.head_dim // 2 for pair in pairs)]
            assert_near(got[..., band], keys[..., band], bound)


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")
@pytest.mark.parametrize("name", SCALED)
def test_keys_left_where_they_were_built_are_wrong_in_every_band(name: str) -> None:
    """The relocation test can fail: not rotating shows in each band of frequencies."""
    hf = lively_hf(name)
    here, there = hf_state(hf, 0)[0][0], hf_state(hf, 700)[0][0]
    for pairs in ((0,), (1, 2, 3), (4, 5, 6, 7)):
        band = [*pairs, *(pair + hf.config.head_dim // 2 for pair in pairs)]
        assert far(here[..., band], there[..., band], rounding(hf, len(SEGMENT)))


@pytest.mark.parametrize("name", FAMILIES)
def test_dense_on_an_empty_store_is_the_transformers_model(name: str) -> None:
    session, prompt = lively_session(name), spanned(70, 90)
    new = random_ids(6, seed=5)
    hf = session.model.hf
    with torch.inference_mode():
        truth = hf(torch.cat([prompt.token_ids, new])[None]).logits[0]
    prefilled = session.prefill(prompt, Dense(), room=len(new))
    bound = rounding(hf, len(prompt) + len(new))
    assert_near(prefilled.logits, truth[len(prompt) - 1], bound)
    extended = session.executor.extend(prefilled, new[:5])
    assert_near(extended, truth[len(prompt) : -1], bound)
    assert_near(session.executor.extend(prefilled, new[5:]), truth[-1:], bound)
    assert prefilled.cache.length == len(prompt) + len(new)


EVERYTHING = [
    Question(share=1.0),
    CacheBlend(share=1.0),
    Epic(k=1000),
    LayerDrop(then=1.0),
    QuestionDrop(first=1.0, then=1.0, windows="none"),
    Dense(),
]


@pytest.mark.parametrize("policy", EVERYTHING, ids=lambda policy: policy.name)
@pytest.mark.parametrize("name", ["llama", "llama-9/3-yarn", "qwen2-14/2", "mistral", "llama-1"])
def test_recomputing_all_of_a_stored_prompt_is_dense(name: str, policy: Policy) -> None:
    session, prompt = lively_session(name), spanned(70, 33, 57)
    hf = session.model.hf
    assert session.build_missing(prompt) == 3
    assert len(session.look_up(prompt).hits) == 3
    with torch.inference_mode():
        truth = hf(prompt.token_ids[None]).logits[0, -1]
    prefilled = session.prefill(prompt, policy)
    assert_near(prefilled.logits, truth, rounding(hf, len(prompt)))
    state = forward(hf, prompt.token_ids)
    for layer, (keys, values) in enumerate(zip(state.keys, state.values, strict=True)):
        bound = rounding(hf, len(prompt))
        found = prefilled.cache.read(layer, torch.arange(len(prompt)))
        assert_near(found[0], keys, bound)
        assert_near(found[1], values, bound)


def test_recomputing_less_than_all_is_not_dense() -> None:
    """The test above can fail."""
    session, prompt = lively_session(), spanned(70, 33, 57)
    session.build_missing(prompt)
    cold = session.prefill(prompt, Dense()).logits
    partly = session.prefill(prompt, Question(share=0.2)).logits
    assert far(partly, cold, rounding(session.model.hf, len(prompt)))


@pytest.mark.parametrize("name", ["llama", "qwen2-14/2", "mistral"])
def test_state_does_not_depend_on_who_caused_it_to_be_stored(name: str) -> None:
    segment = random_ids(40, seed=9).tolist()
    other, question = random_ids(25, seed=10).tolist(), random_ids(9, seed=11).tolist()
    layouts = [
        ([256, *segment, *question], [(1, 41)]),
        ([256, *other, *segment, *question], [(1, 26), (26, 66)]),
        ([256, *segment, *other, *question], [(1, 41), (41, 66)]),
        ([256, *question * 5, *segment, *segment, *question], [(46, 86), (86, 126)]),
    ]
    states = []
    for ids, spans in layouts:
        session = lively_session(name)
        prompt = Prompt.of_ids(ids, spans)
        session.prefill(prompt, Dense())
        session.build_missing(prompt)
        key = session.namespace.key("segment", torch.tensor(segment))
        session.prefill(prompt, CacheBlend())  # using it must not write to it either
        states.append(session.store.get(key))
    for state in states:
        assert state is not None
        assert state.token_ids.tolist() == segment
        for plane in ("key", "value"):
            assert torch.equal(state.planes[plane], states[0].planes[plane])


def test_state_depends_on_the_anchor_and_on_earlier_tokens_of_the_segment() -> None:
    """Else the test above would hold for constants."""
    adapter = adapt(lively_hf())
    base = build_state(adapter, SEGMENT, ANCHOR).planes["key"]
    changed = SEGMENT.clone()
    changed[50] = (changed[50] + 1) % 256
    within = build_state(adapter, changed, ANCHOR).planes["key"]
    assert torch.equal(base[:, :, :50], within[:, :, :50])
    assert bool((base[-1, :, 51:] != within[-1, :, 51:]).any(-1).all())
    assert not torch.equal(base[-1], build_state(adapter, SEGMENT, (256, 7, 8)).planes["key"][-1])
