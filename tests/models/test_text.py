"""Whole characters and stop strings out of tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from redknot.models.byte_tokenizer import byte_tokenizer
from redknot.models.text import TextWriter

TOKENIZER = byte_tokenizer()


def written(text: str, *stop: str) -> tuple[list[str], TextWriter]:
    """Pieces of ``text`` written byte by byte, as the tokenizer cuts it."""
    writer, pieces = TextWriter(TOKENIZER, stop), []
    for token in TOKENIZER(text, add_special_tokens=False).input_ids:
        pieces += writer.add(token)
        if writer.stopped:
            break
    return pieces + list(writer.flush()), writer


@pytest.mark.parametrize("stop", ["b", "abc", "bcabcabcd"])
@pytest.mark.parametrize("text", ["xabcabcabcdy", "ab", "abcab", "aabcx", "xyz", "bcabcabc"])
def test_the_writer_cuts_before_the_first_stop_string(text: str, stop: str) -> None:
    pieces, writer = written(text, stop)
    head, found, _ = text.partition(stop)
    assert "".join(pieces) == writer.text == head
    assert writer.stopped == bool(found)


@pytest.mark.parametrize("stops", [("abcd", "bc"), ("bc", "abcd"), ("", "bc"), ("bc", "c")])
def test_the_stop_string_that_is_complete_first_counts(stops: tuple[str, ...]) -> None:
    pieces, _ = written("xabcde", *stops)
    assert "".join(pieces) == "xa"


def test_text_is_held_back_no_longer_than_it_must() -> None:
    writer = TextWriter(TOKENIZER, ("abc",))
    ids = TOKENIZER("xabyab", add_special_tokens=False).input_ids
    assert ["".join(writer.add(token)) for token in ids] == ["x", "", "", "aby", "", ""]
    assert list(writer.flush()) == ["ab"]


@pytest.mark.parametrize(
    "text", ["Příliš žluťoučký kůň", "🙂 and 👩\u200d👩\u200d👧", "naïve 🧭!", "日本"]
)
def test_characters_arrive_whole(text: str) -> None:
    """SV-04: no replacement mark and no character in two pieces."""
    pieces, writer = written(text)
    assert "".join(pieces) == writer.text == text
    assert "\ufffd" not in "".join(pieces)
    assert len(pieces) == len(text)  # each piece is one character


def test_a_stop_string_of_several_bytes_is_found() -> None:
    pieces, writer = written("kůň 🙂 tam", "🙂")
    assert "".join(pieces) == "kůň "
    assert writer.stopped


def test_a_character_cut_off_by_the_limit_is_left_out() -> None:
    writer, pieces = TextWriter(TOKENIZER, ()), []
    ids = TOKENIZER("a🙂", add_special_tokens=False).input_ids
    for token in ids[:-1]:
        pieces += writer.add(token)
    assert [*pieces, *writer.flush()] == ["a"]
    assert writer.token_ids == ids[:-1]


def test_an_end_token_ends_the_answer_without_text() -> None:
    end = TOKENIZER.eos_token_id
    writer = TextWriter(TOKENIZER, ("abc",), end_token_ids=frozenset({end}))
    ids = TOKENIZER("ab", add_special_tokens=False).input_ids
    pieces = [piece for token in (*ids, end) for piece in writer.add(token)]
    assert "".join([*pieces, *writer.flush()]) == "ab"
    assert writer.stopped
    assert writer.token_ids == [*ids, end]


def fallback(*words: str) -> PreTrainedTokenizerFast:
    """A tokenizer of ``words`` and bytes, which own the blank before them as SentencePiece's do."""
    vocabulary = [*(f"<0x{byte:02X}>" for byte in range(256)), *words]
    backend = Tokenizer(models.BPE({word: at for at, word in enumerate(vocabulary)}, []))
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@given(st.lists(st.one_of(st.integers(0, 255), st.sampled_from([256, 257, *"é🙂".encode()]))))
def test_no_sequence_of_bytes_breaks_a_text(tokens: list[int]) -> None:
    """What is no character may be left out; what stands far from it is there."""
    tokenizer = fallback("a", "b")
    writer = TextWriter(tokenizer)
    for token in [*tokens, *[257] * 5]:
        list(writer.add(token))
    assert "".join([writer.text, *writer.flush()]).endswith("bbbb")


def test_a_text_goes_on_from_what_precedes_it() -> None:
    tokenizer = fallback("\u2581the", "\u2581bridge", "\u2581was")
    for behind, text in (((), "bridge was"), ((256,), " bridge was")):
        writer = TextWriter(tokenizer, behind=behind)
        assert "".join(piece for token in (257, 258) for piece in writer.add(token)) == text
