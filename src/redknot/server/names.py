"""How single tokens are written in log-probabilities."""

from functools import cache, lru_cache

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

MARK = "\ufffd"
BLANK = "\u2581"
"A blank in the vocabularies of SentencePiece."


def name(tokenizer: PreTrainedTokenizerBase, token_id: int) -> tuple[str, list[int] | None]:
    """Text and bytes of a token; a part of a character is written as its bytes."""
    text, token = str(tokenizer.decode([token_id])), str(tokenizer.convert_ids_to_tokens(token_id))
    if BLANK in token and BLANK not in text and token_id not in _added(tokenizer):
        text = token.replace(BLANK, " ")  # decoded alone it loses the one that it begins with
    if MARK not in text:
        return text, list(text.encode())
    raw = _bytes(token)
    if raw is None:
        return text, None
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), raw


def _bytes(token: str) -> list[int] | None:
    """Of a byte-level token, or of one that is written as <0xNN>."""
    if token.startswith("<0x") and token.endswith(">"):
        return [int(token[3:-1], 16)]
    alphabet = _alphabet()
    if any(char not in alphabet for char in token):
        return None
    return [alphabet[char] for char in token]


@lru_cache(maxsize=1)
def _added(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Tokens that stand for themselves, the special ones among them."""
    return frozenset(tokenizer.added_tokens_decoder)


@cache
def _alphabet() -> dict[str, int]:
    """Characters that byte-level tokenizers write bytes with (Radford et al. 2019)."""
    return {char: byte for byte, char in bytes_to_unicode().items()}
