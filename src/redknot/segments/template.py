"""From documents and a question to a prompt: rendered and tokenised once, spans by offsets."""

import os.path
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from redknot.errors import InputError
from redknot.segments.chunking import ChunkSizes, chunk
from redknot.segments.prompt import Prompt, Span

MAX_ANCHOR_TOKENS = 4
MAX_PROBE_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Document:
    """A text that may be reused, and its title."""

    text: str
    title: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTemplate:
    """The user message around documents and question, and how the answer begins."""

    instruction: str = (
        "Answer the question using the documents below. Give only the short answer.\n\n"
    )
    document: str = "Document: {title}\n{text}\n\n"
    "What follows a document belongs to its segment, so that nothing stands between two of them."
    question: str = "Question: {question}\nAnswer with only a few words."
    closing: str = "Answer with only a few words."
    "Ends the user message where no question does, so that a document never stands last."
    answer: str = "Answer:"
    question_first: bool = False


@dataclass(frozen=True, slots=True)
class _Rendered:
    """A whole prompt as text, with character ranges."""

    text: str
    documents: list[tuple[int, int]]
    question: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Tokeniser:
    """Renders through the model's chat template and finds spans by tokenizer offsets."""

    tokenizer: PreTrainedTokenizerBase
    template: PromptTemplate = PromptTemplate()
    chunks: ChunkSizes = ChunkSizes()
    anchor: tuple[int, ...] = field(init=False)
    "First tokens that every rendered prompt shares; canonical state is computed behind them."

    def __post_init__(self) -> None:
        object.__setattr__(self, "anchor", self._shared_start())

    def prompt(
        self,
        documents: Sequence[Document | str],
        question: str = "",
        system: str | None = None,
    ) -> Prompt:
        """A prompt with one span for each document and the question as probe."""
        texts = [self._document(index, document) for index, document in enumerate(documents)]
        rendered = self._render(texts, question, system)
        ids, offsets = self._encode(rendered.text)
        spans = []
        for document, characters in zip(documents, rendered.documents, strict=True):
            start, stop = _inside(offsets, characters)
            if stop > start:
                title = document.title if isinstance(document, Document) else ""
                spans.append(Span(start, stop, title))
        probe = _inside(offsets, rendered.question)
        probe = (max(probe[0], probe[1] - MAX_PROBE_TOKENS), probe[1])
        return Prompt(ids, tuple(spans), probe)

    def plain(self, text: str, system: str | None = None) -> Prompt:
        """One user message without hints: spans by content, the last tokens of it as probe."""
        if not text.strip():
            raise InputError("the prompt is empty")
        head, tail = self._around_user(system)
        ids, offsets = self._encode(head + text + tail)
        start, stop = _inside(offsets, (len(head), len(head) + len(text)))
        probe = max(start, stop - MAX_PROBE_TOKENS)
        chunks = chunk(ids[start:probe], self.chunks)
        return Prompt(ids, tuple(Span(start + a, start + b) for a, b in chunks), (probe, stop))

    def segment(self, document: Document | str) -> torch.Tensor:
        """Token ids of ``document`` as they stand in any prompt."""
        prompt = self.prompt([document], "?")
        return prompt.token_ids[prompt.spans[0].start : prompt.spans[0].stop]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ``token_ids`` without special tokens."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def _document(self, index: int, document: Document | str) -> str:
        plain = document if isinstance(document, Document) else Document(document)
        if not plain.text.strip():
            raise InputError(f"document {index + 1} ({plain.title or 'no title'}) is empty")
        return self.template.document.format(title=plain.title, text=plain.text.strip())

    def _render(self, documents: list[str], question: str, system: str | None) -> _Rendered:
        """Join the parts and note where they begin and end."""
        template = self.template
        head, tail = self._around_user(system)
        asked = template.question.format(question=question.strip()) if question.strip() else ""
        text, ranges = head + template.instruction, []
        asked_at = (0, 0)
        if asked and template.question_first:
            asked_at = (len(text), len(text) + len(asked))
            text += asked + "\n\n"
        for document in documents:
            ranges.append((len(text), len(text) + len(document)))
            text += document
        ends = asked if asked and not template.question_first else template.closing
        if ends is asked or not asked:
            asked_at = (len(text), len(text) + len(ends))
        text += ends
        return _Rendered(text + tail + template.answer, ranges, asked_at)

    def _around_user(self, system: str | None) -> tuple[str, str]:
        """What the chat template puts before and behind the user's text."""
        mark = "\x02user\x03"
        if self.tokenizer.chat_template is None:
            bos = self.tokenizer.bos_token if self.tokenizer("").input_ids else None
            return (bos or "") + (f"{system}\n\n" if system else ""), "\n"
        messages = [{"role": "system", "content": system}] if system is not None else []
        messages.append({"role": "user", "content": mark})
        try:
            rendered = str(
                self.tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=True
                )
            )
        except TemplateError as error:
            raise InputError(f"the model's chat template refuses the request: {error}") from error
        head, _, tail = rendered.rpartition(mark)  # the last: a system message may hold it
        return head, tail

    def _encode(self, text: str) -> tuple[torch.Tensor, list[tuple[int, int]]]:
        encoded: Any = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return torch.tensor(encoded["input_ids"], dtype=torch.int64), encoded["offset_mapping"]

    def _shared_start(self) -> tuple[int, ...]:
        """Tokens that prompts with any system message begin with."""
        renderings = []
        for system in (None, "A", "Zebra"):
            try:
                head, _ = self._around_user(system)
            except InputError:  # some templates know no system message
                continue
            renderings.append(self._encode(head + "x")[0].tolist())
        shared = len(os.path.commonprefix(renderings))
        return tuple(renderings[0][: min(shared, MAX_ANCHOR_TOKENS)])


def _inside(offsets: list[tuple[int, int]], characters: tuple[int, int]) -> tuple[int, int]:
    """The tokens that lie wholly inside a character range; those across a border lie outside."""
    first = bisect_left(offsets, characters[0], key=lambda token: token[0])
    stop = bisect_right(offsets, characters[1], key=lambda token: token[1])
    return (first, stop) if stop > first else (0, 0)
