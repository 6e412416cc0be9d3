"""From tokens to text: streams, stop strings, whole characters, sampling."""

import pytest
from tests.printable import printable_model

from redknot import LLM, Document
from redknot.recovery.policies import Dense

DOCUMENT = Document("The bridge was built in 1904 of red stone. " * 4, "bridge")
QUESTION = "When was the bridge built?"
SAMPLED = {"temperature": 1.0, "seed": 5}


def open_llm() -> LLM:
    return LLM(printable_model(), head_map=None, policy=Dense())


def test_pieces_of_a_stream_join_to_the_text() -> None:
    llm = open_llm()
    stream = llm.stream([DOCUMENT], QUESTION, max_tokens=20, **SAMPLED)
    assert stream.result is None
    pieces = list(stream)
    assert len(pieces) > 5
    assert "".join(pieces) == stream.result.text
    whole = llm.generate([DOCUMENT], QUESTION, max_tokens=20, **SAMPLED)
    assert (whole.text, whole.token_ids) == (stream.result.text, stream.result.token_ids)


@pytest.mark.parametrize("size", [1, 3, 9])
def test_a_stop_string_ends_the_answer_and_never_shows(size: int) -> None:
    """SV-02: it stands across tokens, which are single characters here."""
    llm = open_llm()
    free = llm.generate([DOCUMENT], QUESTION, max_tokens=40, **SAMPLED).text
    assert len(set(free)) > 10
    stop = free[17 : 17 + size]
    stream = llm.stream([DOCUMENT], QUESTION, max_tokens=40, stop=[stop, "\x00"], **SAMPLED)
    pieces = list(stream)
    assert "".join(pieces) == stream.result.text == free[: free.index(stop)]
    assert stream.result.finish_reason == "stop"
    assert len(stream.result.token_ids) == free.index(stop) + size


@pytest.mark.parametrize("count", [1, 2, 13])
def test_max_tokens_is_obeyed(count: int) -> None:
    result = open_llm().generate([DOCUMENT], QUESTION, max_tokens=count)
    assert len(result.token_ids) == len(result.text) == count
    assert result.finish_reason == "length"


@pytest.mark.parametrize("options", [{}, SAMPLED, SAMPLED | {"top_p": 0.8}])
def test_greedy_and_seeded_answers_repeat(options: dict[str, float]) -> None:
    results = [open_llm().generate([DOCUMENT], QUESTION, **options) for _ in range(2)]
    assert results[0].token_ids == results[1].token_ids


def test_another_seed_gives_another_answer() -> None:
    llm = open_llm()
    answers = {
        llm.generate([DOCUMENT], QUESTION, temperature=1.0, seed=seed).token_ids
        for seed in (1, 2, None, None)
    }
    assert len(answers) == 4


def test_a_tiny_nucleus_is_greedy() -> None:
    llm = open_llm()
    greedy = llm.generate([DOCUMENT], QUESTION, max_tokens=20)
    sampled = llm.generate([DOCUMENT], QUESTION, max_tokens=20, temperature=1.0, top_p=1e-6)
    assert sampled.token_ids == greedy.token_ids
