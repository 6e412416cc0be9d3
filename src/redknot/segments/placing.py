"""Where the texts of a request stand in its rendered prompt: in characters, then in tokens."""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from redknot.errors import InputError

Range = tuple[int, int]
NOWHERE: Range = (0, 0)

_BLANK_LINES = re.compile(r"\n[ \t\r]*\n(?:[ \t\r]*\n)*")
_TRIMS: tuple[Callable[[str], tuple[int, int]], ...] = (
    lambda text: (0, len(text)),
    lambda text: (len(text) - len(text.lstrip()), len(text.rstrip())),
    lambda text: (0, len(text.rstrip())),
    lambda text: (len(text) - len(text.lstrip()), len(text)),
    lambda text: (len(text) - len(text.lstrip("\n")), len(text.rstrip("\n"))),
    lambda text: (0, len(text.rstrip("\n"))),
    lambda text: (len(text) - len(text.lstrip("\n")), len(text)),
)
"What chat templates keep of a text, as a range of it."


@dataclass(frozen=True, slots=True)
class Kept:
    """What of a text is in the prompt, and where that begins."""

    place: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Placed:
    """A rendered prompt and where the texts that went into it stand."""

    text: str
    texts: tuple[str, ...]
    kept: tuple[Kept | None, ...]
    "None where the template changed a text more than by trimming it, or left it out."

    def characters(self, index: int, start: int = 0, stop: int | None = None) -> Range:
        """Where characters ``start`` to ``stop`` of a text stand; `NOWHERE` if they do not.

        Where the template changed the text, they are searched for.
        """
        stop = len(self.texts[index]) if stop is None else stop
        kept = self.kept[index]
        if kept is not None:
            start, stop = (min(max(at, kept.start), kept.stop) for at in (start, stop))
            shift = kept.place - kept.start
            return (start + shift, stop + shift) if stop > start else NOWHERE
        whole = self.texts[index][start:stop]
        for wanted in (whole, whole.strip()):
            found = self.text.rfind(wanted)  # from behind: the question is what must be right
            if wanted.strip() and found >= 0:
                return found, found + len(wanted)
        return NOWHERE


def place(texts: Sequence[str], render: Callable[[Sequence[str]], str]) -> Placed:
    """Render ``texts`` and find each in the result, by rendering marks in their place.

    The text is always that of the real rendering; marks only tell where to look, and only if
    both renderings agree in everything else.
    """
    text = render(texts)
    stem, number = "redknot0x", 0
    while stem in text:
        number += 1
        stem = f"redknot{number}x"
    marks = [f"{stem}{index}x" if one else "" for index, one in enumerate(texts)]
    try:
        parts = re.split(rf"{stem}(\d+)x", render(marks))
    except InputError:  # a template may insist on what it is given
        parts = [""]
    kept = _follow(text, texts, parts[::2], [int(index) for index in parts[1::2]])
    return Placed(text, tuple(texts), tuple(kept.get(index) for index in range(len(texts))))


def _follow(
    text: str, texts: Sequence[str], between: list[str], order: list[int]
) -> dict[int, Kept]:
    """Go through ``text`` from one text to the next; nothing is known unless all of it fits.

    A text that was changed ends where what follows it comes next.
    """
    found: dict[int, Kept] = {}
    place = len(between[0])
    if not text.startswith(between[0]):
        return {}
    for index, follows in zip(order, between[1:], strict=True):
        kept = _kept(text, texts[index], follows, place)
        if kept is not None:
            found[index] = kept
            place += kept.stop - kept.start + len(follows)
        elif follows and (at := text.find(follows, place)) >= 0:
            place = at + len(follows)
        else:
            return {}
    return found if place == len(text) else {}


def _kept(text: str, one: str, follows: str, place: int) -> Kept | None:
    """What of ``one`` stands at ``place`` with ``follows`` behind it."""
    for trim in _TRIMS:
        start, stop = trim(one)
        if text.startswith(one[start:stop] + follows, place):
            return Kept(place, start, stop)
    return None


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """A text as tokens."""

    text: str
    token_ids: Int[Tensor, "token"]
    offsets: list[Range]
    "Characters of each token, growing."

    def __len__(self) -> int:
        return self.token_ids.shape[0]

    def inside(self, characters: Range) -> Range:
        """The tokens wholly inside a character range; those across a border lie outside."""
        first = bisect_left(self.offsets, characters[0], key=lambda token: token[0])
        stop = bisect_right(self.offsets, characters[1], key=lambda token: token[1])
        return (first, stop) if stop > first else NOWHERE

    def words(self, start: int, stop: int) -> str:
        """The text of tokens ``start`` to ``stop``."""
        return self.text[self.offsets[start][0] : self.offsets[stop - 1][1]] if stop > start else ""

    def breaks(self, start: int, stop: int) -> list[int]:
        """Tokens strictly between ``start`` and ``stop`` that are the first behind blank lines."""
        if stop <= start:
            return []
        found = _BLANK_LINES.finditer(self.text, self.offsets[start][0], self.offsets[stop - 1][1])
        tokens = (bisect_left(self.offsets, one.end(), key=lambda token: token[0]) for one in found)
        return sorted({token for token in tokens if start < token < stop})


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> Encoded:
    """Tokenise once, adding nothing; control tokens written in ``text`` become control tokens."""
    encoded: Any = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids = torch.tensor(encoded["input_ids"], dtype=torch.int64)
    return Encoded(text, ids, encoded["offset_mapping"])
