"""Head maps are exact masks in prefill, chunks and decode, and nothing leaks through them."""

import random

import pytest
import torch
from tests.execution.eager import (
    FAMILIES,
    assert_near,
    far,
    forward,
    held,
    lively_hf,
    rounding,
    section_3,
    spanned,
)
from tests.tiny import random_ids
from transformers import PreTrainedModel

from redknot.execution import ExecutionSettings
from redknot.execution.session import Session
from redknot.heads import HeadClass, HeadMap, HeadRule
from redknot.models.byte_tokenizer import byte_tokenizer
from redknot.models.loading import wrap_model
from redknot.recovery.policies import Duo
from redknot.segments import Prompt

CHUNKS = [None, 7, 64]


def random_map(hf: PreTrainedModel, seed: int) -> HeadMap:
    """Random classes, windows and sinks, others for each phase."""
    draw = random.Random(seed)

    def rule() -> HeadRule:
        if draw.random() < 0.3:
            return HeadRule(head_class=draw.choice([HeadClass.GLOBAL, HeadClass.DENSE]))
        return HeadRule.local(draw.choice([1, 2, 8, 16, 41, 64, 500]), draw.choice([0, 1, 4, 20]))

    def phase() -> tuple[tuple[HeadRule, ...], ...]:
        groups = range(hf.config.num_key_value_heads)
        return tuple(tuple(rule() for _ in groups) for _ in range(hf.config.num_hidden_layers))

    return HeadMap(prefill=phase(), decode=phase())


def all_local(hf: PreTrainedModel, window: int, sink: int) -> HeadMap:
    """Every head of both phases with one window and sink."""
    groups = hf.config.num_key_value_heads
    rules = ((HeadRule.local(window, sink),) * groups,) * hf.config.num_hidden_layers
    return HeadMap(prefill=rules, decode=rules)


def open_session(hf: PreTrainedModel, chunk_tokens: int | None = None) -> Session:
    settings = ExecutionSettings(chunk_tokens=chunk_tokens)
    return Session(wrap_model(hf, byte_tokenizer(add_bos=True)), settings=settings)


def assert_masked(session: Session, prompt: Prompt, head_map: HeadMap, new: torch.Tensor) -> None:
    """Prefill and every step of a token-by-token decode equal eager attention under the masks."""
    hf, total = session.model.hf, len(prompt) + len(new)
    border = prompt.spans[-1].stop if prompt.spans else 0
    ids = torch.cat([prompt.token_ids, new])
    truth = forward(hf, ids, section_3(head_map, border))
    bound = rounding(hf, total)
    prefilled = session.prefill(prompt, Duo(windows="all"), head_map, room=len(new))
    assert_near(prefilled.logits, truth.logits[len(prompt) - 1], bound)
    steps = [session.executor.extend(prefilled, token[None]) for token in new]
    for step, logits in enumerate(steps):
        assert_near(logits, truth.logits[len(prompt) + step][None], bound)
    # Keys and values of deeper layers show that each row saw its own set, not only the last.
    for layer, (keys, values) in enumerate(zip(truth.keys, truth.values, strict=True)):
        found_keys, found_values, there = held(prefilled.cache, layer)
        assert there.shape[1] == total
        assert_near(found_keys[there], keys[there], bound)
        assert_near(found_values[there], values[there], bound)


@pytest.mark.parametrize("chunk_tokens", CHUNKS)
@pytest.mark.parametrize("name", FAMILIES)
def test_any_pair_of_head_maps_equals_eager_attention_under_the_masks(
    name: str, chunk_tokens: int | None
) -> None:
    hf, seed = lively_hf(name), CHUNKS.index(chunk_tokens)
    prompt = spanned(61, 64, question=32, seed=seed)
    session = open_session(hf, chunk_tokens)
    assert_masked(session, prompt, random_map(hf, seed), random_ids(4, seed=3))


@pytest.mark.parametrize("chunk_tokens", CHUNKS)
@pytest.mark.parametrize("name", ["llama", "qwen3-yarn", "mistral"])
def test_decode_keeps_true_positions_long_after_the_window_has_moved_on(
    name: str, chunk_tokens: int | None
) -> None:
    """Sink 4, window 8, parity at every step up to three windows and more."""
    hf = lively_hf(name)
    head_map = all_local(hf, window=8, sink=4)
    session = open_session(hf, chunk_tokens)
    assert_masked(session, spanned(20, 11, question=9), head_map, random_ids(30, seed=3))


@pytest.mark.parametrize("chunk_tokens", CHUNKS)
@pytest.mark.parametrize("segments", [(), (63,)])
def test_each_query_of_one_prefill_sees_its_own_window(
    segments: tuple[int, ...], chunk_tokens: int | None
) -> None:
    hf = lively_hf()
    question = 64 - 8 - sum(segments) if not segments else 1
    prompt = spanned(*segments, question=question)
    session = open_session(hf, chunk_tokens)
    assert_masked(session, prompt, all_local(hf, window=16, sink=0), random_ids(1))


@pytest.mark.parametrize("name", ["llama", "llama-1", "qwen2-14/2", "mistral"])
def test_one_token_more_or_less_in_a_window_or_sink_would_be_noticed(name: str) -> None:
    """The bound of this module is far below the smallest mistake."""
    hf, prompt = lively_hf(name), spanned(61, 64)
    bound = rounding(hf, len(prompt))
    border = prompt.spans[-1].stop

    def logits(window: int, sink: int) -> torch.Tensor:
        mask = section_3(all_local(hf, window, sink), border)
        return forward(hf, prompt.token_ids, mask).logits[-1]

    base = logits(16, 4)
    assert far(logits(17, 4), base, bound)
    assert far(logits(15, 4), base, bound)
    if name != "mistral":  # sinks lie behind its own sliding window
        assert far(logits(16, 3), base, bound)
        assert far(logits(16, 5), base, bound)


def test_the_phases_use_their_own_maps() -> None:
    """The question's rows follow the decode map, context rows the prefill map."""
    hf, prompt = lively_hf(), spanned(61, 64, question=5)  # context within reach of every map
    wide, narrow = all_local(hf, 64, 4), all_local(hf, 8, 4)
    session = open_session(hf)
    results = [
        session.prefill(prompt, Duo(), HeadMap(prefill=first.prefill, decode=second.decode)).logits
        for first in (wide, narrow)
        for second in (wide, narrow)
    ]
    bound = rounding(hf, len(prompt))
    for index, result in enumerate(results):
        for other in results[:index]:
            assert far(result, other, bound)


WINDOW, SINK = 8, 3


def changed_at(prompt: Prompt, position: int) -> Prompt:
    ids = prompt.token_ids.clone()
    ids[position] = (ids[position] + 1) % 256
    return Prompt(ids, prompt.spans, prompt.probe)


@pytest.mark.parametrize("name", ["llama-1", "qwen2-14/2-1"])
@pytest.mark.parametrize("group", [0, 1])
def test_a_local_head_is_moved_by_tokens_inside_its_set_and_by_no_other(
    name: str, group: int
) -> None:
    """One layer whose output projection reads one group only; the other group is global."""
    hf = lively_hf(name)
    per_group = hf.config.num_attention_heads // 2 * hf.config.head_dim
    columns = torch.zeros(2 * per_group)
    columns[group * per_group : (group + 1) * per_group] = 1
    with torch.no_grad():
        hf.model.layers[0].self_attn.o_proj.weight.mul_(columns)
    rules = [HeadRule(), HeadRule()]
    rules[group] = HeadRule.local(WINDOW, SINK)
    head_map = HeadMap(prefill=(tuple(rules),), decode=(tuple(rules),))
    session, prompt = open_session(hf), spanned(20, 11, question=9)
    base = session.prefill(prompt, Duo(), head_map).logits
    last = len(prompt) - 1
    visible = {*range(SINK), *range(last - WINDOW + 1, last + 1)}
    for position in range(1, len(prompt)):
        logits = session.prefill(changed_at(prompt, position), Duo(), head_map).logits
        assert torch.equal(logits, base) == (position not in visible), position
    mirrored = HeadMap(prefill=(tuple(rules[::-1]),), decode=(tuple(rules[::-1]),))
    base = session.prefill(prompt, Duo(), mirrored).logits  # now the group is global
    for position in (SINK, last - WINDOW):
        logits = session.prefill(changed_at(prompt, position), Duo(), mirrored).logits
        assert not torch.equal(logits, base), position
