"""What decoding keeps is what it may see: same logits, less memory, nothing overwritten."""

import pytest
import torch
from tests.execution.eager import (
    assert_near,
    forward,
    lively_hf,
    lively_session,
    rounding,
    section_3,
    spanned,
)
from tests.execution.test_masks import all_local, open_session, random_map
from tests.tiny import random_ids

from redknot.execution.executor import Prefilled
from redknot.execution.session import Session
from redknot.heads import HeadMap
from redknot.recovery.policies import Dense, Duo

STEPS = 30
NAMES = ["llama", "llama-9/3", "qwen2-14/2-1", "qwen3-yarn", "mistral", "qwen2-mixed"]


def decode(session: Session, prefilled: Prefilled, new: torch.Tensor) -> torch.Tensor:
    return torch.cat([session.executor.extend(prefilled, token[None]) for token in new])


@pytest.mark.parametrize("lengths", [(61, 64), (2,)], ids=["long", "short"])
@pytest.mark.parametrize("name", NAMES)
def test_decoding_with_what_is_kept_equals_eager_attention_under_the_masks(
    name: str, lengths: tuple[int, ...]
) -> None:
    """Steps 1, window, 3 * window and more, with windows longer and shorter than the prompt."""
    hf, new = lively_hf(name), random_ids(STEPS, seed=3)
    session, prompt = open_session(hf), spanned(*lengths, question=3)
    maps = [random_map(hf, 1), all_local(hf, 8, 4), all_local(hf, 1, 0)]
    for head_map in maps:
        truth = forward(
            hf,
            torch.cat([prompt.token_ids, new]),
            section_3(head_map, prompt.spans[-1].stop),
        )
        prefilled = session.prefill(prompt, Duo(), head_map, room=STEPS).retain()
        logits = decode(session, prefilled, new)
        assert_near(logits, truth.logits[len(prompt) :], rounding(hf, len(prompt) + STEPS))


@pytest.mark.parametrize("name", ["mistral", "qwen2-mixed"])
def test_a_sliding_window_of_the_model_alone_is_kept_right(name: str) -> None:
    session, prompt, new = lively_session(name), spanned(61, 20), random_ids(STEPS, seed=3)
    truth = forward(session.model.hf, torch.cat([prompt.token_ids, new]))
    prefilled = session.prefill(prompt, Dense(), room=STEPS).retain()
    logits = decode(session, prefilled, new)
    bound = rounding(session.model.hf, len(prompt) + STEPS)
    assert_near(logits, truth.logits[len(prompt) :], bound)


def test_a_fork_that_is_cut_leaves_the_whole_cache_as_it_was() -> None:
    hf, new = lively_hf(), random_ids(STEPS, seed=3)
    session, prompt, head_map = open_session(hf), spanned(61, 64), all_local(hf, 8, 4)
    whole = session.prefill(prompt, Duo(), head_map, room=STEPS)
    first = decode(session, whole.fork().retain(), new)
    second = decode(session, whole.fork().retain(), new)
    assert torch.equal(first, second)
    assert_near(decode(session, whole, new), first, rounding(hf, len(prompt) + STEPS))


def test_local_heads_free_memory_and_global_ones_do_not() -> None:
    hf = lively_hf()
    session, prompt = open_session(hf), spanned(400)
    local = all_local(hf, 8, 4)
    held = []
    for share in (0.0, 0.5, 1.0):
        scores = torch.arange(8.0).view(4, 2)
        mixed = HeadMap.from_scores(scores, global_share=share, window=8, sink=4)
        head_map = HeadMap(prefill=local.prefill, decode=mixed.decode)
        prefilled = session.prefill(prompt, Duo(), head_map).retain()
        held.append(prefilled.cache.num_bytes)
    page = 16 * 2 * 16 * 4  # 16 tokens of one group: two planes of 16 float32
    seen = {0, *(position // 16 for position in range(len(prompt) - 7, len(prompt) + 1))}
    filled = {position // 16 for position in range(len(prompt))}
    assert held[0] == 8 * len(seen & filled) * page
    assert held[0] < held[1] < held[2]


@pytest.mark.parametrize(("retained", "global_share"), [(False, 0.5), (True, 0.5), (True, 0.0)])
def test_a_long_decode_stays_right(retained: bool, global_share: float) -> None:
    """The cache grows page by page and never takes the place of an older token."""
    hf = lively_hf()
    session, prompt, new = open_session(hf), spanned(9, question=4), random_ids(150, seed=3)
    scores = torch.rand(4, 2, generator=torch.Generator().manual_seed(0))
    head_map = HeadMap.from_scores(scores, global_share=global_share, window=8, sink=4)
    prefilled = session.prefill(prompt, Duo(), head_map)
    if retained:
        prefilled = prefilled.retain()
    ids = torch.cat([prompt.token_ids, new])
    truth = forward(hf, ids, section_3(head_map, prompt.spans[-1].stop)).logits
    for step, token in enumerate(new):
        logits = session.executor.extend(prefilled, token[None])
        row = truth[len(prompt) + step][None]
        assert_near(logits, row, rounding(hf, len(ids)))


def test_many_tokens_at_once_equal_one_by_one_on_a_cut_cache() -> None:
    hf, new = lively_hf(), random_ids(STEPS, seed=3)
    session, prompt = open_session(hf), spanned(61)
    cut = session.prefill(prompt, Duo(), all_local(hf, 8, 4)).retain()
    one_by_one = decode(session, cut.fork(), new)
    at_once = session.executor.extend(cut, new)
    assert_near(at_once, one_by_one, rounding(hf, len(prompt) + STEPS))


def test_a_cut_cache_does_not_go_back() -> None:
    hf = lively_hf()
    session, prompt = open_session(hf), spanned(61)
    prefilled = session.prefill(prompt, Duo(), all_local(hf, 8, 4)).retain()
    with pytest.raises(ValueError, match="no way back"):
        prefilled.cache.truncate(len(prompt) - 1)
