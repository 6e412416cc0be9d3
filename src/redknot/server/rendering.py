"""From OpenAI messages and prompts to token ids, spans and the question."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from redknot.errors import InputError
from redknot.segments import Document, Prompt, PromptTemplate, Span
from redknot.segments.chat import (
    adds_bos,
    check_variables,
    render_chat,
    template_of,
)
from redknot.segments.chunking import ChunkSizes
from redknot.segments.placing import NOWHERE, Encoded, Placed, Range, encode, place
from redknot.segments.question import QuestionPlace
from redknot.server.hints import Piece, Reader, TextPart
from redknot.server.tools import ToolFormat

__all__ = ["ChatMessage", "Renderer", "TextPart"]
_RULE = "---\n\n"
_BREAK = "\n\n"


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """A message; without parts its text is empty, which null content means too."""

    role: str
    parts: tuple[TextPart | Document, ...] = ()
    "A document has the ids here that it has in every other place."
    extra: Mapping[str, Any] = field(default_factory=dict)
    "Further fields as OpenAI names them: name, tool_calls, tool_call_id."


@dataclass(frozen=True, slots=True)
class _Written:
    """A message with its documents as text."""

    role: str
    parts: tuple[TextPart, ...]
    extra: Mapping[str, Any]


class Renderer:
    """Makes prompts of requests.

    Spans are, if anything is marked, exactly the marked parts and the documents; else, if the user
    sends several parts in a message, all of them but the one that asks, if they are long enough;
    else chunks by content. Marks switch chunks off but for very long texts. The probe is the
    user's last text outside of segments, its last tokens or, in front of the segments, its first.

    Control tokens that are written out in a text ("<|im_end|>") become control tokens, as in
    other engines and as `apply_chat_template` has it; no segment ever holds one.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        chunks: ChunkSizes = ChunkSizes(),
        template: PromptTemplate = PromptTemplate(),
    ) -> None:
        self._tokenizer, self._chunks, self._template = tokenizer, chunks, template
        self.smallest = chunks.smallest
        "Fewest tokens of a segment that nobody marked; what is marked may have any length."
        self.tool_format = ToolFormat.of(template_of(tokenizer, [{}]))
        "How the model calls tools; None if it, or this server, cannot."
        self.control = frozenset(tokenizer.all_special_ids) | {
            number for number, token in tokenizer.added_tokens_decoder.items() if token.special
        }
        "Control tokens, which are no text."
        self._bos = [tokenizer.bos_token_id] if adds_bos(tokenizer) else []
        self._heading = self._closing = ""
        self._heading = "" if self._same_ids_in_front() else _RULE
        self._closing = "" if self._same_ids_at_the_end() else _RULE.strip()

    def chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        documents: Sequence[Document] = (),
        tools: Sequence[Mapping[str, Any]] = (),
        question: QuestionPlace = "auto",
        variables: Mapping[str, Any] | None = None,
    ) -> Prompt:
        """The prompt of a conversation, ids as `apply_chat_template` gives them.

        ``documents`` go to a template that knows them, else in front of the last message of the
        user. ``variables`` are the client's own for the template (`chat_template_kwargs`).
        `InputError` where the template refuses or a document is empty.
        """
        if tools and self.tool_format is None:
            raise InputError("the model's chat template has no tool calls that could be read")
        if not messages:
            raise InputError("there are no messages")
        check_variables(self._tokenizer, variables or {})
        settings = {**(variables or {}), **({"tools": list(tools)} if tools else {})}
        for number, document in enumerate(documents, 1):
            self._template.of(document, number)  # none may be empty
        written, found = [self._written(message) for message in messages], list[Range]()
        if documents and _knows_documents(template_of(self._tokenizer, tools or None)):
            placed = self._place(written, settings, documents)
            found = _documents_in(placed, len(messages), len(documents))
        if not found or NOWHERE in found:
            found = []
            if documents:
                written = [self._written(one) for one in _in_front(messages, documents)]
            placed = self._place(written, settings)
        encoded = encode(self._tokenizer, placed.text)
        if not len(encoded):
            raise InputError("the prompt is empty")
        given = [
            Span(*encoded.inside(characters), document.title)
            for characters, document in zip(found, documents if found else (), strict=True)
        ]
        return self._read(encoded, _pieces(written, placed, encoded), given, question)

    def completion(
        self,
        prompt: str | Sequence[int],
        *,
        question: QuestionPlace = "auto",
    ) -> Prompt:
        """The prompt of a text, with the BOS that the tokenizer adds, or of ids as they are."""
        if isinstance(prompt, str):
            encoded = encode(self._tokenizer, prompt)
            bos = [] if encoded.token_ids[:1].tolist() == self._bos else self._bos
            ids = torch.tensor([*bos, *encoded.token_ids.tolist()], dtype=torch.int64)
            offsets = [NOWHERE] * len(bos) + encoded.offsets
            encoded, start = Encoded(prompt, ids, offsets), len(bos)
        else:
            encoded, start = self._decoded(prompt), 0
        if len(encoded) == start:
            raise InputError("the prompt is empty")
        piece = Piece(0, "user", TextPart(encoded.text), (start, len(encoded)))
        return self._read(encoded, [piece], [], question)

    def segment(self, text: str, title: str = "") -> Int[Tensor, "token"]:
        """Ids of a document as they stand in any prompt that has it in ``documents``."""
        user = ChatMessage("user", (TextPart("?"),))
        return _only_span(self.chat([user], documents=[Document(text, title)]))

    def forms(self, text: str, title: str = "") -> list[Int[Tensor, "token"]]:
        """Ids of a document wherever it may stand, as a rule the same everywhere.

        A template that knows documents writes them in its own way, and not those in a message.
        """
        given = self.segment(text, title)
        user = ChatMessage("user", (Document(text, title), TextPart("?")))
        said = _only_span(self.chat([user]))
        return [given] if torch.equal(given, said) else [given, said]

    def _place(
        self,
        messages: Sequence[_Written],
        settings: Mapping[str, Any],
        documents: Sequence[Document] = (),
    ) -> Placed:
        """Render; the texts are those of the messages, then title and text of each document."""
        extras = [self._extra(message) for message in messages]
        contents = ["".join(part.text for part in message.parts) for message in messages]
        handed = [text for one in documents for text in (one.title, one.text.strip())]

        def render(texts: Sequence[str]) -> str:
            rows = [
                {**extra, "role": message.role, "content": text}
                for message, text, extra in zip(messages, texts, extras, strict=False)
            ]
            rest = texts[len(messages) :]
            pairs = [{"title": a, "text": b} for a, b in zip(rest[::2], rest[1::2], strict=True)]
            variables = {**settings, "documents": pairs} if pairs else settings
            return render_chat(self._tokenizer, rows, variables)

        return place([*contents, *handed], render)

    def _extra(self, message: _Written) -> dict[str, Any]:
        if self.tool_format is None:
            return dict(message.extra)
        return self.tool_format.for_template(message.extra)

    def _written(self, message: ChatMessage) -> _Written:
        """Documents as text, set apart from what stands beside them: no token joins the two."""
        parts: list[TextPart] = []
        number, behind = 0, False
        for part in message.parts:
            if isinstance(part, TextPart):
                text = part.text.lstrip() if behind else part.text
                parts += [replace(part, text=text)] if text or not behind else []
                behind = behind and not text
                continue
            number += 1
            if not any(one.text.strip() for one in parts):
                parts = [TextPart(self._heading, False)] if self._heading else []
            elif not parts[-1].text.endswith(_BREAK):
                parts.append(TextPart(_BREAK, False))
            parts.append(TextPart(self._template.of(part, number), True, part.title))
            behind = True
        if behind and self._closing:
            parts.append(TextPart(self._closing, False))
        return _Written(message.role, tuple(parts), message.extra)

    def _same_ids_in_front(self) -> bool:
        """Whether a document has the same ids directly behind the head of the user's message."""
        return self._same_ids((Document("x", "x"), Document("x", "x"), TextPart("?")))

    def _same_ids_at_the_end(self) -> bool:
        """Whether a document has the same ids where nothing follows in its message."""
        return self._same_ids((Document("x", "x"), Document("x", "x")))

    def _same_ids(self, parts: tuple[TextPart | Document, ...]) -> bool:
        try:
            prompt = self.chat([ChatMessage("user", parts)])
        except InputError:  # a template that does not take a single message
            return True
        ids = [prompt.token_ids[span.start : span.stop].tolist() for span in prompt.spans]
        return all(one == ids[0] for one in ids)

    def _read(
        self,
        encoded: Encoded,
        pieces: Sequence[Piece],
        given: Sequence[Span],
        place: QuestionPlace,
    ) -> Prompt:
        reader = Reader(encoded, pieces, given, self._chunks, place, self.control)
        return Prompt(encoded.token_ids, *reader.read())

    def _decoded(self, token_ids: Sequence[int]) -> Encoded:
        """Ids of a client's making; their text serves to find blank lines and questions."""
        wrong = [token for token in token_ids if not 0 <= token < len(self._tokenizer)]
        if wrong:
            raise InputError(f"token {wrong[0]} is none of the model's {len(self._tokenizer)}")
        different = list(dict.fromkeys(token_ids))
        decoded = self._tokenizer.batch_decode([[token] for token in different])
        texts = dict(zip(different, decoded, strict=True))
        ends = list(accumulate((len(texts[token]) for token in token_ids), initial=0))
        text = "".join(texts[token] for token in token_ids)
        return Encoded(text, torch.tensor(token_ids, dtype=torch.int64), list(pairwise(ends)))


def _in_front(messages: Sequence[ChatMessage], documents: Sequence[Document]) -> list[ChatMessage]:
    """``documents`` before the user's last words."""
    users = [index for index, message in enumerate(messages) if message.role == "user"]
    if not users:
        raise InputError("documents need a message of the user")
    changed, last = list(messages), messages[users[-1]]
    changed[users[-1]] = replace(last, parts=(*documents, *last.parts))
    return changed


def _only_span(prompt: Prompt) -> Int[Tensor, "token"]:
    if len(prompt.spans) != 1:
        raise InputError("the text holds control tokens, or the chat template changes it")
    return prompt.token_ids[prompt.spans[0].start : prompt.spans[0].stop]


def _knows_documents(template: str | None) -> bool:
    return template is not None and re.search(r"\bdocuments\b", template) is not None


def _documents_in(placed: Placed, first: int, count: int) -> list[Range]:
    """Where each document stands with its title, as the template has placed them."""
    found = []
    for index in range(first, first + 2 * count, 2):
        title, text = placed.characters(index), placed.characters(index + 1)
        together = NOWHERE not in (title, text) and title[1] <= text[0]
        found.append((title[0], text[1]) if together else text)
    return found


def _pieces(messages: Sequence[_Written], placed: Placed, encoded: Encoded) -> list[Piece]:
    """The parts of the messages that own tokens."""
    pieces = []
    for index, message in enumerate(messages):
        start = 0
        for part in message.parts:
            stop = start + len(part.text)
            tokens = encoded.inside(placed.characters(index, start, stop))
            if tokens != NOWHERE:
                pieces.append(Piece(index, message.role, part, tokens))
            start = stop
    return sorted(pieces, key=lambda piece: piece.tokens)
