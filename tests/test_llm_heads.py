"""Head maps through the library: eviction changes memory, not tokens."""

import pytest
import torch
from tests.execution.eager import spanned
from tests.printable import printable_model

from redknot import LLM, Document, HeadMap, InputError
from redknot.evaluation.fidelity import greedy
from redknot.heads import HeadRule
from redknot.recovery.policies import Duo, parse_policy

DOCUMENTS = [
    Document("The bridge was built in 1904 of red stone by the town of Lom. " * 4, "bridge"),
    Document("The tower was never finished, since the money ran out early. " * 4, "tower"),
]
QUESTION = "When was the bridge built?"
POLICIES = ["duo", "reuse:windows=all", "question_drop:windows=all", "redknot:windows=all"]


def half_local(window: int, seed: int = 0) -> HeadMap:
    """Half of the groups of the tiny model, drawn, see sink and window."""
    scores = torch.rand(4, 2, generator=torch.Generator().manual_seed(seed))
    return HeadMap.from_scores(scores, global_share=0.5, window=window, sink=4)


def full_bytes(tokens: int) -> int:
    """Two planes of 4 layers, 2 KV heads and 16 float32."""
    return tokens * 2 * 4 * 2 * 16 * 4


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("window", [8, 64])
def test_decoding_with_eviction_equals_decoding_on_the_whole_cache(
    policy: str, window: int
) -> None:
    llm = LLM(printable_model(), head_map=half_local(window), policy=policy, planned=False)
    for document in DOCUMENTS:
        llm.segment(document)
    result = llm.generate(DOCUMENTS, QUESTION, max_tokens=40)
    assert result.policy == policy
    prompt = llm.prompt(DOCUMENTS, QUESTION)
    whole = llm.session.prefill(prompt, parse_policy(policy), llm.head_map, room=40)
    ends = llm.session.model.end_token_ids
    assert list(result.token_ids) == greedy(llm.session.executor, whole, ends, 40)
    pages = 4 * 2 * 2 * 16  # each group may hold two pages of 16 tokens beyond what it sees
    assert (
        whole.retain().cache.num_bytes < 0.8 * full_bytes(len(prompt)) + full_bytes(1) * pages / 8
    )


def test_half_of_the_heads_local_frees_45_percent_of_the_bytes() -> None:
    """HD-03: 4k tokens, sink 4 and window 64, against the prompt's tokens without any room."""
    llm = LLM(printable_model(), head_map=half_local(64), planned=False)
    prompt = spanned(4000, question=88)
    assert len(prompt) == 4096
    prefilled = llm.session.prefill(prompt, Duo(), llm.head_map).retain()
    assert prefilled.cache.num_bytes <= 0.55 * full_bytes(len(prompt))
    assert llm.session.executor.storage.num_bytes_used == prefilled.cache.num_bytes


@pytest.mark.parametrize("policy", ["reuse", "question_drop", "duo", "reuse:windows=all"])
def test_64_steps_after_reuse_stay_finite(policy: str) -> None:
    """HD-12."""
    llm = LLM(printable_model(), head_map=half_local(16), policy=policy, planned=False)
    for document in DOCUMENTS:
        llm.segment(document)
    result = llm.generate(DOCUMENTS, QUESTION, max_tokens=64)
    assert len(result.token_ids) == len(result.text) == 64
    prompt = llm.prompt(DOCUMENTS, QUESTION)
    state = llm.session.prefill(prompt, llm.policy, llm.head_map, room=64).retain()
    assert bool(state.logits.isfinite().all())
    for token in result.token_ids:
        logits = llm.session.executor.extend(state, torch.tensor([token]))
        assert bool(logits.isfinite().all())
    assert state.cache.length == len(prompt) + 64


def test_a_map_of_another_shape_or_of_other_weights_is_refused() -> None:
    model = printable_model()
    rules = ((HeadRule.local(8, 4),) * 2,) * 3
    with pytest.raises(InputError, match="3 layers"):
        LLM(model, head_map=HeadMap(prefill=rules, decode=rules))
    four = rules + rules[:1]
    with pytest.raises(InputError, match="other weights"):
        LLM(model, head_map=HeadMap(prefill=four, decode=four, weights="0" * 64))
    assert LLM(model, head_map="auto").head_map is None  # none ships for random weights
