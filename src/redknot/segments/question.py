"""The question and the reusable chunks of a text that comes without hints."""

import re
from typing import Literal

from redknot.segments.chunking import ChunkSizes, chunk
from redknot.segments.placing import Encoded, Range

QuestionPlace = Literal["auto", "first", "last"]
MAX_PROBE_TOKENS = 128
_FEWEST = 8  # tokens of a paragraph that may be a question without a question mark
_ASKS = re.compile("[?\u037e\u055e\u061f\u1367\u203d\u2047-\u2049\u2e2e\ufe56\uff1f\ufe16]")


def asks(text: str) -> bool:
    """Whether a question mark of any script is in ``text``."""
    return _ASKS.search(text) is not None


def question_in(encoded: Encoded, start: int, stop: int, place: QuestionPlace) -> Range:
    """The question of a text that stands at these tokens: its end, or its beginning.

    With "auto" it is the beginning only if that asks and the end does not. It reaches to the
    nearest blank line with a question, and over `MAX_PROBE_TOKENS` tokens at most.
    """
    length = min(MAX_PROBE_TOKENS, stop - start)
    if place == "auto":
        head = asks(encoded.words(start, start + length))
        first = head and not asks(encoded.words(stop - length, stop))
        place = "first" if first else "last"
    if place == "first":
        borders = encoded.breaks(start, start + length)
        asking = [b for b in borders if asks(encoded.words(start, b))]
        longer = [b for b in borders if b - start >= _FEWEST]
        return start, (asking or longer or [start + length])[0]
    borders = encoded.breaks(stop - length, stop)
    asking = [b for b in borders if asks(encoded.words(b, stop))]
    longer = [b for b in borders if stop - b >= _FEWEST]
    return (asking or longer or [stop - length])[-1], stop


def chunks_around(
    encoded: Encoded, start: int, stop: int, probe: Range, sizes: ChunkSizes
) -> list[Range]:
    """Chunks of the text at these tokens, in front of the question and behind it."""
    ends = probe[0] >= stop or probe[0] in encoded.breaks(start, stop)
    before = _chunks(encoded, start, min(stop, probe[0]), sizes, ends)
    return before + _chunks(encoded, max(start, probe[1]), stop, sizes, ends=True)


def _chunks(encoded: Encoded, start: int, stop: int, sizes: ChunkSizes, ends: bool) -> list[Range]:
    """Without ``ends`` the last paragraph goes on behind ``stop``."""
    if stop <= start:
        return []
    breaks = [border - start for border in encoded.breaks(start, stop)]
    breaks += [stop - start] if ends else []
    cut = chunk(encoded.token_ids[start:stop], sizes, breaks)
    return [(start + first, start + last) for first, last in cut]
