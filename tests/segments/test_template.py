"""Spans through the chat template: exactly the documents, whatever stands around them."""

import random
import unicodedata
from functools import cache

import pytest
from transformers import PreTrainedTokenizerBase

from redknot.errors import InputError
from redknot.models.byte_tokenizer import byte_tokenizer
from redknot.models.loading import LoadOptions, _source, _tokenizer
from redknot.segments import Document, Prompt, PromptTemplate, Tokeniser
from redknot.segments.chat import MAX_ANCHOR_TOKENS
from redknot.segments.template import MAX_PROBE_TOKENS

BARE = PromptTemplate(instruction="Read", document="{text}", question="{question}", answer="")
"Documents glued to the text around them."


@cache
def tokenizer(name: str) -> PreTrainedTokenizerBase:
    if name == "embedded":
        return _tokenizer(_source("embedded"), LoadOptions())
    made = byte_tokenizer(add_bos="bos" in name)
    if "no template" in name:
        made.chat_template = None
    return made


BYTES = ["bytes", "bytes bos", "bytes no template", "bytes bos no template"]
ALL = [*BYTES, pytest.param("embedded", marks=pytest.mark.model)]

TEXTS = {
    "plain": "The quick brown fox jumps over the lazy dog.",
    "leading blanks": "   \n\t  indented",
    "trailing blanks": "ends with blanks  \n\n  ",
    "crlf": "one\r\ntwo\r\n\r\nthree",
    "nfc": unicodedata.normalize("NFC", "Ångström café naïve"),
    "nfd": unicodedata.normalize("NFD", "Ångström café naïve"),
    "emoji": "👩‍🔬 measured 🧪🧪 at 25 °C 🇩🇪",
    "scripts": "数据 данные डेटा データ",
    "one letter": "x",
    "braces": "{text} {0} {question} %s {{ messages }}",
    "digits": "12345 67890",
    "marks": "\x02user\x03 and <documents> </s> [DOC]",
}


def spans_of(prompt: Prompt) -> list[list[int]]:
    return [prompt.token_ids[span.start : span.stop].tolist() for span in prompt.spans]


def decode(name: str, ids: list[int]) -> str:
    return tokenizer(name).decode(ids, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("question_first", [False, True])
@pytest.mark.parametrize("system", [None, "Be brief.", ""])
@pytest.mark.parametrize("name", ALL)
def test_spans_decode_to_exactly_the_formatted_documents(
    name: str, system: str | None, question_first: bool
) -> None:
    template = PromptTemplate(question_first=question_first)
    documents = [Document(text, title) for title, text in TEXTS.items()]
    prompt = Tokeniser(tokenizer(name), template).prompt(documents, "Why 🧪?", system)
    assert len(prompt.spans) == len(documents)
    for document, span, ids in zip(documents, prompt.spans, spans_of(prompt), strict=True):
        assert span.title == document.title
        expected = template.document.format(title=document.title, text=document.text.strip())
        assert decode(name, ids) == expected
    for before, after in zip(prompt.spans, prompt.spans[1:], strict=False):
        assert before.stop == after.start  # nothing between two documents
    assert decode(name, prompt.token_ids[slice(*prompt.probe)].tolist()) == (
        "Question: Why 🧪?\nAnswer with only a few words."
    )
    assert (prompt.probe[1] <= prompt.spans[0].start) == question_first


AROUND = {
    "question last": (False, "Why?"),
    "question first": (True, "  who is it?  "),
    "no question": (False, ""),
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("name", ALL)
def test_a_segment_alone_has_the_ids_it_has_in_any_prompt(name: str, around: str) -> None:
    """Whatever stands before and behind it, the end of the user message included."""
    question_first, question = AROUND[around]
    tokeniser = Tokeniser(tokenizer(name), PromptTemplate(question_first=question_first))
    wrong = []
    for title, text in TEXTS.items():
        document = Document(text, title)
        alone = tokeniser.segment(document).tolist()
        for others in ([], ["before"], ["1 2 3", "\n ends\n"]):
            first = tokeniser.prompt([document, *others], question)
            last = tokeniser.prompt([*others, document], question, "Be brief.")
            found = {"first": spans_of(first)[0], "last": spans_of(last)[-1]}
            wrong += [(title, len(others), at) for at, ids in found.items() if ids != alone]
    assert not wrong


@pytest.mark.parametrize("name", BYTES)
def test_documents_glued_to_text_are_found_with_and_without_bos(name: str) -> None:
    tokeniser = Tokeniser(tokenizer(name), BARE)
    prompt = tokeniser.prompt(["alpha", "beta"], "gamma")
    assert [decode(name, ids) for ids in spans_of(prompt)] == ["alpha", "beta"]
    assert "Readalphabetagamma" in decode(name, prompt.token_ids.tolist())


@pytest.mark.parametrize("name", ["bytes bos", "bytes bos no template"])
def test_a_prompt_has_exactly_one_bos_and_it_comes_first(name: str) -> None:
    tokeniser = Tokeniser(tokenizer(name))
    bos = tokenizer(name).bos_token_id
    prompts = [
        tokeniser.prompt(["alpha", "beta"], "gamma"),
        tokeniser.prompt(["alpha", "beta"], "gamma", "system"),
        tokeniser.prompt([], "gamma"),
        tokeniser.plain("gamma " * 200),
        tokeniser.plain("gamma", "system"),
    ]
    for prompt in prompts:
        assert (prompt.token_ids == bos).nonzero().flatten().tolist() == [0]
    assert bos not in tokeniser.segment("alpha").tolist()


@pytest.mark.parametrize("name", ["bytes", "bytes no template"])
def test_a_tokenizer_that_adds_no_bos_gets_none(name: str) -> None:
    prompt = Tokeniser(tokenizer(name)).prompt(["alpha"], "gamma", "system")
    assert tokenizer(name).bos_token_id not in prompt.token_ids.tolist()


@pytest.mark.parametrize("name", ALL)
def test_every_prompt_starts_with_the_anchor(name: str) -> None:
    tokeniser = Tokeniser(tokenizer(name))
    anchor = list(tokeniser.anchor)
    assert len(anchor) <= MAX_ANCHOR_TOKENS
    assert bool(anchor) == ("bos" in name or name == "embedded")
    for system in (None, "", "Be brief.", "<|user|>"):
        prompt = tokeniser.prompt(["alpha"], "gamma", system)
        assert prompt.token_ids[: len(anchor)].tolist() == anchor
        assert tokeniser.plain("x", system).token_ids[: len(anchor)].tolist() == anchor


@pytest.mark.parametrize("blank", ["", "   ", "\n\t\r\n"])
def test_an_empty_document_is_refused_by_its_number(blank: str) -> None:
    tokeniser = Tokeniser(tokenizer("bytes"))
    with pytest.raises(InputError, match="document 2"):
        tokeniser.prompt(["alpha", blank], "gamma")
    with pytest.raises(InputError, match="Note"):
        tokeniser.prompt([Document(blank, "Note")], "gamma")
    with pytest.raises(InputError, match="empty"):
        tokeniser.plain(blank)


@pytest.mark.parametrize("name", ALL)
def test_without_a_question_the_closing_behind_the_documents_asks(name: str) -> None:
    prompt = Tokeniser(tokenizer(name)).prompt(["alpha", "beta"])
    assert prompt.probe[0] == prompt.spans[-1].stop
    probed = decode(name, prompt.token_ids[slice(*prompt.probe)].tolist())
    assert probed == PromptTemplate().closing


@pytest.mark.parametrize("name", ALL)
def test_without_documents_there_are_no_spans(name: str) -> None:
    prompt = Tokeniser(tokenizer(name)).prompt([], "gamma?")
    assert prompt.spans == ()
    assert "gamma?" in decode(name, prompt.token_ids[slice(*prompt.probe)].tolist())


@pytest.mark.parametrize("name", ALL)
def test_a_long_question_is_probed_at_its_end(name: str) -> None:
    question = " ".join(f"word{index}" for index in range(300))
    prompt = Tokeniser(tokenizer(name)).prompt(["alpha"], question)
    assert prompt.probe[1] - prompt.probe[0] == MAX_PROBE_TOKENS
    probed = decode(name, prompt.token_ids[slice(*prompt.probe)].tolist())
    assert probed.endswith("Answer with only a few words.")


@pytest.mark.parametrize("length", [1, 127, 128, 129, 136, 137, 140, 143, 144, 500, 3000])
def test_a_plain_message_of_any_length_is_cut_and_probed_inside_itself(length: int) -> None:
    text = "".join(random.Random(length).choices("abcdefgh", k=length))
    prompt = Tokeniser(tokenizer("bytes bos")).plain(text, "system")
    user = tokenizer("bytes bos").convert_tokens_to_ids("<|user|>")
    start = prompt.token_ids.tolist().index(user) + 1
    assert prompt.probe[1] == start + length
    assert prompt.probe[1] - prompt.probe[0] == min(length, MAX_PROBE_TOKENS)
    for span in prompt.spans:
        assert start <= span.start < span.stop <= prompt.probe[0]
    assert bool(prompt.spans) == (length >= 3000)


@pytest.mark.parametrize("name", BYTES)
def test_no_text_is_taken_for_a_placeholder(name: str) -> None:
    """A system message that holds what the code uses inside leaves the documents where they are."""
    tokeniser = Tokeniser(tokenizer(name))
    prompt = tokeniser.prompt(["alpha"], "gamma", "say \x02user\x03 twice")
    text = decode(name, prompt.token_ids.tolist())
    assert text.index("say \x02user\x03 twice") < text.index("alpha")
    assert [decode(name, ids) for ids in spans_of(prompt)] == ["Document: \nalpha\n\n"]
