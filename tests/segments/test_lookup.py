"""Stored segments are found whole behind any beginning, in any order, with hints and without."""

import random

import pytest
import torch
from tests.tiny import random_ids, tiny_session

from redknot.segments import PromptTemplate, Tokeniser

BARE = PromptTemplate(instruction="Read", document="{text}", question="{question}", answer="")


def letters(count: int, seed: int) -> str:
    """Text of ``count`` byte tokens."""
    return bytes(97 + byte % 26 for byte in random_ids(count, seed).tolist()).decode()


@pytest.mark.parametrize("add_bos", [False, True])
def test_documents_are_found_behind_system_prompts_of_any_length(add_bos: bool) -> None:
    session = tiny_session(add_bos=add_bos)
    documents = ["first " * 12, "second " * 9]
    session.build_missing(session.tokeniser.prompt(documents, "Why?"))
    first = None
    for system in (None, "", "x", "x" * 5, "x" * 16, "x" * 300):
        lookup = session.look_up(session.tokeniser.prompt(documents, "Why?", system))
        assert [outcome.status for outcome in lookup.outcomes] == ["stored", "stored"]
        states = [state for _, state in lookup.hits]
        first = first or states
        assert all(one is other for one, other in zip(states, first, strict=True))


@pytest.mark.parametrize("seed", range(3))
def test_documents_of_any_length_in_any_order_are_found_whole(seed: int) -> None:
    lengths = [1, 15, 16, 17, 255, 257]
    draw = random.Random(seed)
    documents = [letters(length, seed * 10 + index) for index, length in enumerate(lengths)]
    session = tiny_session(add_bos=True)
    tokeniser = Tokeniser(session.model.tokenizer, BARE)
    session.build_missing(tokeniser.prompt(documents, "why"))
    draw.shuffle(documents)
    prompt = tokeniser.prompt(documents, "why")
    hits = session.look_up(prompt).hits
    assert sum(len(span) for span, _ in hits) == sum(lengths)
    for document, (span, state) in zip(documents, hits, strict=True):
        assert document == tokeniser.decode(state.token_ids.tolist())
        assert torch.equal(state.token_ids, prompt.token_ids[span.start : span.stop])


def test_an_unchanged_client_that_sends_one_string_gets_hits() -> None:
    """The same long text behind another beginning and with another end."""
    session = tiny_session(add_bos=True)
    text = letters(3000, 4)
    session.build_missing(session.tokeniser.plain("Hello. " + text + " Why?" * 40))
    prompt = session.tokeniser.plain("Dear all, " + text + " Where is it?" * 20)
    found = sum(len(span) for span, _ in session.look_up(prompt).hits)
    assert found > 0.5 * 3000


def test_a_changed_end_leaves_every_full_segment_reused() -> None:
    session = tiny_session(add_bos=True)
    text = letters(3000, 4)
    prompt = session.tokeniser.plain(text)
    session.build_missing(prompt)
    changed = session.tokeniser.plain(text[:-3] + "XYZ")
    assert changed.spans == prompt.spans
    assert {outcome.status for outcome in session.look_up(changed).outcomes} == {"stored"}
