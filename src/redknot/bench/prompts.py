"""Prompts of an exact length: a prefix behind the anchor, segments, and a question."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from redknot.errors import InputError
from redknot.execution.session import Session
from redknot.segments import Prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptShape:
    """How many tokens stand where; the last segment is cut so that all add up."""

    tokens: int
    segment_tokens: int = 2048
    prefix: int = 39
    question: int = 64

    def __post_init__(self) -> None:
        if self.segment_tokens < 1:
            raise InputError(f"segments of {self.segment_tokens} tokens")
        least = self.prefix + self.question + 1
        if self.tokens < least:
            raise InputError(f"a prompt of {self.tokens} tokens: {least} is the least")

    @property
    def segments(self) -> tuple[int, ...]:
        """Tokens of every segment."""
        whole, rest = divmod(self.tokens - self.prefix - self.question, self.segment_tokens)
        return (self.segment_tokens,) * whole + ((rest,) if rest else ())


@dataclass(frozen=True, slots=True)
class Request:
    """What a client sends: plain token ids and where their segments stand."""

    token_ids: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    probe: tuple[int, int]
    "The question."

    @classmethod
    def of(cls, prefix: list[int], segments: Iterable[list[int]], question: list[int]) -> "Request":
        """The parts side by side."""
        ids, spans = list(prefix), []
        for segment in segments:
            spans.append((len(ids), len(ids) + len(segment)))
            ids += segment
        probe = (len(ids), len(ids) + len(question))
        return cls((*ids, *question), tuple(spans), probe)

    def segments(self) -> list[list[int]]:
        """Token ids of every segment."""
        return [list(self.token_ids[start:stop]) for start, stop in self.spans]

    def prompt(self, token_ids: list[int]) -> Prompt:
        """As the library takes it, from a fresh copy of the ids."""
        return Prompt.of_ids(token_ids, list(self.spans), self.probe)


class Tokens:
    """Random ordinary tokens of a model's vocabulary, a seed's own sequence."""

    def __init__(self, session: Session, seed: int) -> None:
        model = session.model
        special = model.end_token_ids | set(model.tokenizer.all_special_ids)
        size = int(model.hf.config.get_text_config().vocab_size)
        self._ordinary = torch.tensor([id_ for id_ in range(size) if id_ not in special])
        self._generator = torch.Generator().manual_seed(seed)
        self._anchor = list(session.namespace.anchor)

    def draw(self, count: int) -> list[int]:
        """The next ``count`` ids."""
        index = torch.randint(len(self._ordinary), (count,), generator=self._generator)
        return self._ordinary[index].tolist()

    def permutation(self, count: int) -> list[int]:
        """The next random order of so many things."""
        return torch.randperm(count, generator=self._generator).tolist()

    def prefix(self, count: int) -> list[int]:
        """The anchor, which stored state asks for, and random ids."""
        return self._anchor + self.draw(count - len(self._anchor))

    def request(self, shape: PromptShape) -> Request:
        """A prompt all of whose parts are new."""
        segments = [self.draw(count) for count in shape.segments]
        return Request.of(self.prefix(shape.prefix), segments, self.draw(shape.question))

    def around(self, segments: list[list[int]], shape: PromptShape) -> Request:
        """Known ``segments`` in the next random order between a new prefix and a new question."""
        shuffled = [segments[place] for place in self.permutation(len(segments))]
        return Request.of(self.prefix(shape.prefix), shuffled, self.draw(shape.question))
