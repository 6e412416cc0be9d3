"""What of a prompt is reusable and what is the question: from marked parts, or by content."""

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from redknot.segments import Span
from redknot.segments.chunking import ChunkSizes
from redknot.segments.placing import Encoded, Range
from redknot.segments.question import (
    MAX_PROBE_TOKENS,
    QuestionPlace,
    asks,
    chunks_around,
    question_in,
)


@dataclass(frozen=True, slots=True)
class TextPart:
    """A text of a message."""

    text: str
    segment: bool | None = None
    "Reusable wherever it stands: True and False are the caller's word, None says nothing."
    title: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A part where it stands in the prompt."""

    message: int
    role: str
    part: TextPart
    tokens: Range


@dataclass(frozen=True, slots=True, eq=False)
class Reader:
    """Reads one prompt."""

    encoded: Encoded
    pieces: Sequence[Piece]
    "In the order of the prompt, none without tokens."
    given: Sequence[Span]
    "Documents that the template itself placed."
    sizes: ChunkSizes
    place: QuestionPlace
    control: frozenset[int]
    "Control tokens, which no segment holds."

    def read(self) -> tuple[tuple[Span, ...], Range]:
        """Spans and question; see `Renderer` for the rules."""
        asking = self._asking()
        own = [piece for piece in self.pieces if piece.message == asking]
        marked = bool(self.given) or any(piece.part.segment for piece in self.pieces)
        if marked:
            chosen = dict.fromkeys(piece for piece in self.pieces if piece.part.segment)
        else:
            chosen = dict.fromkeys(self._unmarked(own))
        hinted = marked or bool(self._several())
        whole = [(span.start, span.stop, span.title) for span in self.given]
        whole += [(*piece.tokens, piece.part.title) for piece in chosen]
        spans = [
            Span(*tokens, title)
            for start, stop, title in whole
            for tokens in self._clean((start, stop))
        ]
        probe = self._probe(own, chosen, spans, hinted)
        for start, stop in self._runs(chosen):
            if not hinted or stop - start > 2 * self.sizes.largest:
                for tokens in self._clean((start, stop)):
                    cut = chunks_around(self.encoded, *tokens, probe, self.sizes)
                    spans += [Span(*one) for one in cut]
        return tuple(self._apart(spans, probe)), probe

    def _asking(self) -> int:
        """The last message of the user; without one, the last that says anything."""
        said = [piece for piece in self.pieces if _says(piece)]
        users = [piece.message for piece in said if piece.role == "user"]
        return (users or [piece.message for piece in said] or [-1])[-1]

    def _several(self) -> set[int]:
        """Messages of the user that consist of several parts."""
        said = [piece.message for piece in self.pieces if piece.role == "user" and _says(piece)]
        return {first for first, second in pairwise(said) if first == second}

    def _unmarked(self, own: list[Piece]) -> list[Piece]:
        """Parts of a user who sends several, but for the one that asks."""
        if not self._several():
            return []
        said = [piece for piece in own if _says(piece)]
        first = self.place == "first" or (self.place == "auto" and _first_asks(said))
        asking = said[0 if first else -1]
        return [
            piece
            for piece in self.pieces
            if piece.role == "user"
            and piece is not asking
            and piece.part.segment is None
            and _length(piece) >= self.sizes.smallest
        ]

    def _probe(
        self, own: list[Piece], chosen: Collection[Piece], spans: list[Span], hinted: bool
    ) -> Range:
        """At most `MAX_PROBE_TOKENS` tokens of the user's text outside of segments."""
        gaps = [gap for gap in _gaps(own, chosen) if any(_says(piece) for piece in gap)]
        if not gaps:
            start = min(max((span.stop for span in spans), default=0), len(self.encoded) - 1)
            return max(start, len(self.encoded) - MAX_PROBE_TOKENS), len(self.encoded)
        gap = gaps[0 if self.place == "first" else -1]
        start, stop = gap[0].tokens[0], gap[-1].tokens[1]
        if not hinted or stop - start > 2 * self.sizes.largest:
            return question_in(self.encoded, start, stop, self.place)
        if any(piece.tokens[0] >= stop for piece in own if piece in chosen):  # segments follow
            return start, min(stop, start + MAX_PROBE_TOKENS)
        return max(start, stop - MAX_PROBE_TOKENS), stop

    def _runs(self, chosen: Collection[Piece]) -> list[Range]:
        """Texts that may be cut into chunks."""
        free = [piece for piece in self.pieces if piece.part.segment is not False]
        return [(run[0].tokens[0], run[-1].tokens[1]) for run in _gaps(free, chosen)]

    def _clean(self, tokens: Range) -> Iterator[Range]:
        """``tokens`` without control tokens."""
        ids = self.encoded.token_ids[slice(*tokens)].tolist()
        borders = [-1, *(at for at, token in enumerate(ids) if token in self.control), len(ids)]
        for before, after in pairwise(borders):
            if after > before + 1:
                yield tokens[0] + before + 1, tokens[0] + after

    @staticmethod
    def _apart(spans: list[Span], probe: Range) -> Iterator[Span]:
        """Spans in order, none over another or over the question."""
        end = 0
        for span in sorted(spans, key=lambda span: span.start):
            start, stop = max(span.start, end), span.stop
            if start < probe[1] and probe[0] < stop:
                start, stop = (start, probe[0]) if start < probe[0] else (probe[1], stop)
            if stop > start:
                yield Span(start, stop, span.title)
                end = stop


def _gaps(pieces: Sequence[Piece], chosen: Collection[Piece]) -> list[list[Piece]]:
    """Neighbours of one message between the chosen ones."""
    gaps: list[list[Piece]] = [[]]
    for piece in pieces:
        if piece in chosen or (gaps[-1] and gaps[-1][-1].message != piece.message):
            gaps.append([])
        if piece not in chosen:
            gaps[-1].append(piece)
    return [gap for gap in gaps if gap]


def _first_asks(said: list[Piece]) -> bool:
    first, last = said[0], said[-1]
    short, long = _length(first) <= MAX_PROBE_TOKENS, _length(last) > MAX_PROBE_TOKENS
    return short and long and asks(first.part.text) and not asks(last.part.text)


def _says(piece: Piece) -> bool:
    return re.search(r"\w", piece.part.text) is not None


def _length(piece: Piece) -> int:
    return piece.tokens[1] - piece.tokens[0]
