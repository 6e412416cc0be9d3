"""How single tokens are written in log-probabilities."""

from functools import cache

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

MARK = "\ufffd"


def name(tokenizer: PreTrainedTokenizerBase, token_id: int) -> tuple[str, list[int] | None]:
    """Text and bytes of a token; a part of a character is written as its bytes."""
    text = str(tokenizer.decode([token_id]))
    if MARK not in text:
        return text, list(text.encode())
    raw = _bytes(str(tokenizer.convert_ids_to_tokens(token_id)))
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


@cache
def _alphabet() -> dict[str, int]:
    """Characters that byte-level tokenizers write bytes with (Radford et al. 2019)."""
    return {char: byte for byte, char in bytes_to_unicode().items()}
