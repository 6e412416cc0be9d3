"""One choice of an answer: from tokens to pieces of text and calls of tools."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal, Protocol

from transformers import PreTrainedTokenizerBase

from redknot.engine.messages import Ended, Submit, TokenInfo
from redknot.models.text import TextWriter
from redknot.server.tools import ToolCall

Reason = Literal["stop", "length", "tool_calls"]


class Parser(Protocol):
    """Finds calls of tools in text that comes piece by piece."""

    def feed(self, text: str) -> list[str | ToolCall]:
        """What became certain with ``text``."""

    def finish(self) -> list[str | ToolCall]:
        """The rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request to the engine, and what becomes of its tokens."""

    request: Submit
    stop: tuple[str, ...] = ()
    parser: Callable[[], Parser] | None = None
    "Made for each choice; None where no tools are offered."
    hidden: frozenset[int] = frozenset()
    "Tokens that are no text where tools are offered: control tokens but for those of calls."
    behind: tuple[int, ...] = ()
    "Last tokens of a text that the answer goes on from; none where it is a text of its own."
    single_call: bool = False
    "End a choice with its first call of a tool."


@dataclass(frozen=True, slots=True)
class Piece:
    """New text of a choice or a call of a tool, and the log-probabilities that belong to it."""

    choice: int
    content: str | ToolCall
    logprobs: tuple[tuple[int, TokenInfo], ...] = ()
    "Each with the place in the text where the token begins."
    num_tokens: int = 0
    "Of the choice so far."


@dataclass(frozen=True, slots=True)
class Finished:
    """A choice is complete."""

    choice: int
    reason: Reason
    num_tokens: int
    "Up to the one that completed it."


@dataclass(slots=True)
class Choice:
    """Tokens in, pieces out; stop strings end it before the engine knows."""

    job: Job
    index: int
    tokenizer: PreTrainedTokenizerBase
    ends: frozenset[int]
    "Tokens that may turn out to be an end token, which is no text."
    done: bool = False
    num_tokens: int = 0
    _writer: TextWriter = field(init=False)
    _parser: Parser | None = field(init=False)
    _held: TokenInfo | None = None
    _untold: list[tuple[int, TokenInfo]] = field(default_factory=list)
    _num_calls: int = 0

    def __post_init__(self) -> None:
        self._parser = None if self.job.parser is None else self.job.parser()
        shown = self._parser is not None  # markers of calls may be special tokens
        self._writer = TextWriter(
            self.tokenizer,
            self.job.stop,
            skip_special_tokens=not shown,
            behind=self.job.behind,
        )

    def add(self, tokens: tuple[TokenInfo, ...]) -> Iterator[Piece | Finished]:
        """What new tokens give. The last is held back while it may be an end token."""
        if self._held is not None:
            tokens = (self._held, *tokens)
            self._held = None
        if tokens and tokens[-1].token_id in self.ends:
            *others, self._held = tokens
            tokens = tuple(others)
        for token in tokens:
            if not self.done:
                yield from self._feed(token)

    def end(self, ended: Ended) -> Iterator[Piece | Finished]:
        """What the engine's word that the choice is complete gives."""
        held, self._held = self._held, None
        if held is not None and ended.stop_token is None:
            yield from self._feed(held)
        elif held is not None:
            self.num_tokens += 1
        if not self.done:
            yield from self._finish("length" if ended.reason == "length" else "stop")

    def _feed(self, token: TokenInfo) -> Iterator[Piece | Finished]:
        self.num_tokens += 1
        self._untold.append((self._writer.length, token))
        hidden = token.token_id in self.job.hidden
        yield from self._tell("" if hidden else "".join(self._writer.add(token.token_id)))
        if self._writer.stopped or self._called:
            yield from self._finish("stop")

    def _finish(self, reason: Reason) -> Iterator[Piece | Finished]:
        self.done = True
        yield from self._tell("".join(self._writer.flush()), last=True)
        if self._num_calls and reason == "stop":
            reason = "tool_calls"
        yield Finished(self.index, reason, self.num_tokens)

    def _tell(self, text: str, *, last: bool = False) -> Iterator[Piece]:
        """``text`` as pieces, the first with the log-probabilities of what is told by now."""
        parts = self._parts(text, last)
        told = self._told(last) if parts or last else ()
        if told and not parts and self.job.request.sampling.logprobs is not None:
            parts = [""]
        for part in parts:
            self._num_calls += isinstance(part, ToolCall)
            yield Piece(self.index, part, told, self.num_tokens)
            told = ()
            if self._called:
                return

    def _parts(self, text: str, last: bool) -> list[str | ToolCall]:
        """Content and calls that ``text`` makes certain; none behind the only call."""
        if self._called:
            return []
        if self._parser is None:
            return [text] if text else []
        parts = self._parser.feed(text) if text else []
        return parts + self._parser.finish() if last else parts

    @property
    def _called(self) -> bool:
        """Whether the only call has been made that is wanted."""
        return self.job.single_call and self._num_calls > 0

    def _told(self, last: bool) -> tuple[tuple[int, TokenInfo], ...]:
        """Tokens that begin before the end of the text; all where no stop string cut it."""
        limit = len(self._writer.text)
        whole = last and not self._writer.stopped
        told = tuple(entry for entry in self._untold if whole or entry[0] < limit)
        self._untold = self._untold[len(told) :]
        return told
