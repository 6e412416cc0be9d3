"""Tokens in log-probabilities: joined they are the text, blanks included."""

import pytest
from tests.server.templates import bytes_with, embedded, sentencepiece
from tokenizers import AddedToken, decoders
from transformers import PreTrainedTokenizerBase

from redknot.models.byte_tokenizer import byte_tokenizer
from redknot.server.names import name

TEXT = "the bridge was built  of [INST] x\nand who is it?"
CONTROL = "<\uff5cend\u2581of\u2581sentence\uff5c>"


def llama() -> PreTrainedTokenizerBase:
    """Decodes as Llama 2: blanks put back by a rule, the first one cut off."""
    made = sentencepiece("")
    made.backend_tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return made


KINDS = {
    "metaspace": lambda: sentencepiece(""),
    "llama": llama,
    "bytes": lambda: bytes_with(None, add_bos=False),
    "embedded": embedded,
}
of_all = pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.model] * (kind == "embedded")) for kind in KINDS]
)


@of_all
def test_joined_names_and_bytes_are_the_text(kind: str) -> None:
    tokenizer = KINDS[kind]()
    told = [name(tokenizer, one) for one in tokenizer(TEXT, add_special_tokens=False).input_ids]
    before = " " if kind in ("metaspace", "llama") else ""  # theirs begin a text with one
    assert "".join(text for text, _ in told) == before + TEXT
    assert bytes(byte for _, raw in told for byte in raw).decode() == before + TEXT


@of_all
def test_added_tokens_stay_as_they_are(kind: str) -> None:
    tokenizer = byte_tokenizer() if kind == "embedded" else KINDS[kind]()
    plain = AddedToken("<\u2581mark\u2581>", normalized=False)
    tokenizer.add_tokens([plain, AddedToken(CONTROL, special=True, normalized=False)])
    for word in (str(plain), CONTROL, tokenizer.bos_token):
        token_id = tokenizer.convert_tokens_to_ids(word)
        decoded = str(tokenizer.decode([token_id]))
        assert name(tokenizer, token_id) == (decoded, list(decoded.encode()))


def test_a_part_of_a_character_is_its_bytes() -> None:
    tokenizer = bytes_with(None, add_bos=False)
    ids = tokenizer("\u017e", add_special_tokens=False).input_ids
    assert [name(tokenizer, one) for one in ids] == [
        ("bytes:\\xc5", [0xC5]),
        ("bytes:\\xbe", [0xBE]),
    ]
