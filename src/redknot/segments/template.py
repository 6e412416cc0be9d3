"""From documents and a question to a prompt: rendered and tokenised once, spans by offsets."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedTokenizerBase

from redknot.errors import InputError
from redknot.segments.chat import render_chat, shared_start
from redknot.segments.chunking import ChunkSizes
from redknot.segments.placing import Encoded, Placed, Range, encode, place
from redknot.segments.prompt import Prompt, Span
from redknot.segments.question import MAX_PROBE_TOKENS, chunks_around, question_in


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

    def of(self, document: Document, number: int = 1) -> str:
        """The text that stands for ``document``, the ``number``-th of its request."""
        if not document.text.strip():
            raise InputError(f"document {number} ({document.title or 'no title'}) is empty")
        return self.document.format(title=document.title, text=document.text.strip())


@dataclass(frozen=True, slots=True)
class Tokeniser:
    """Renders through the model's chat template and finds spans by tokenizer offsets."""

    tokenizer: PreTrainedTokenizerBase
    template: PromptTemplate = PromptTemplate()
    chunks: ChunkSizes = ChunkSizes()
    anchor: tuple[int, ...] = field(init=False)
    "First tokens that every rendered prompt shares; canonical state is computed behind them."

    def __post_init__(self) -> None:
        object.__setattr__(self, "anchor", shared_start(self.tokenizer))

    def prompt(
        self,
        documents: Sequence[Document | str],
        question: str = "",
        system: str | None = None,
    ) -> Prompt:
        """A prompt with one span for each document and the question as probe."""
        plain = [one if isinstance(one, Document) else Document(one) for one in documents]
        text, ranges, asked = self._user_text(plain, question)
        placed, user = self._place(text, system)
        encoded = encode(self.tokenizer, placed.text + self.template.answer)
        spans = []
        for document, characters in zip(plain, ranges, strict=True):
            start, stop = encoded.inside(placed.characters(user, *characters))
            if stop > start:
                spans.append(Span(start, stop, document.title))
        probe = encoded.inside(placed.characters(user, *asked))
        probe = (max(probe[0], probe[1] - MAX_PROBE_TOKENS), probe[1])
        return Prompt(encoded.token_ids, tuple(spans), probe)

    def plain(self, text: str, system: str | None = None) -> Prompt:
        """One user message without hints: spans by content, its question as probe."""
        if not text.strip():
            raise InputError("the prompt is empty")
        placed, user = self._place(text, system)
        encoded: Encoded = encode(self.tokenizer, placed.text)
        start, stop = encoded.inside(placed.characters(user))
        probe = question_in(encoded, start, stop, "auto")
        chunks = chunks_around(encoded, start, stop, probe, self.chunks)
        return Prompt(encoded.token_ids, tuple(Span(*chunk) for chunk in chunks), probe)

    def segment(self, document: Document | str) -> torch.Tensor:
        """Token ids of ``document`` as they stand in any prompt."""
        prompt = self.prompt([document], "?")
        return prompt.token_ids[prompt.spans[0].start : prompt.spans[0].stop]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ``token_ids`` without special tokens."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def _user_text(
        self, documents: Sequence[Document], question: str
    ) -> tuple[str, list[Range], Range]:
        """The user message, where the documents stand in it, and where the question does."""
        template = self.template
        asked = template.question.format(question=question.strip()) if question.strip() else ""
        text, ranges = template.instruction, []
        first = (len(text), len(text) + len(asked))
        if asked and template.question_first:
            text += asked + "\n\n"
        for number, document in enumerate(documents, 1):
            formatted = template.of(document, number)
            ranges.append((len(text), len(text) + len(formatted)))
            text += formatted
        if asked and template.question_first:
            return text + template.closing, ranges, first
        end = asked or template.closing
        return text + end, ranges, (len(text), len(text) + len(end))

    def _place(self, text: str, system: str | None) -> tuple[Placed, int]:
        """A rendered conversation, and which of its texts is the user's."""
        roles = ["user"] if system is None else ["system", "user"]

        def render(texts: Sequence[str]) -> str:
            pairs = zip(roles, texts, strict=True)
            return render_chat(
                self.tokenizer, [{"role": role, "content": content} for role, content in pairs]
            )

        texts = [text] if system is None else [system, text]
        return place(texts, render), len(texts) - 1
