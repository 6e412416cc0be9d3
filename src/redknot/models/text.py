"""From tokens to text: whole characters, and nothing of a stop string."""

from collections.abc import Iterator, Sequence

from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase


class TextWriter:
    """Turns tokens into whole characters and holds back what may become a stop string."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop: tuple[str, ...] = (),
        *,
        end_token_ids: frozenset[int] = frozenset(),
        skip_special_tokens: bool = True,
        behind: Sequence[int] = (),
    ) -> None:
        """``end_token_ids`` end the text and are no part of it.

        ``behind`` are the tokens that the text goes on from: some tokenizers write the blank in
        front of a word only where something precedes it.
        """
        self._tokenizer, self._ends = tokenizer, end_token_ids
        self._skip_special_tokens = skip_special_tokens
        self._stop = tuple(part for part in stop if part)
        self._stream = DecodeStream(list(behind), skip_special_tokens)
        self._held = ""
        self.text = ""
        "What has been given out."
        self.token_ids: list[int] = []
        self.stopped = False
        "By an end token or a stop string; add nothing more."

    @property
    def length(self) -> int:
        """Characters so far, those held back included."""
        return len(self.text) + len(self._held)

    def add(self, token: int) -> Iterator[str]:
        """Text that became certain with ``token``."""
        self.token_ids.append(token)
        if token in self._ends:
            self.stopped = True
            return
        self._held += self._decoded(token)
        found = [at for part in self._stop if (at := self._held.find(part)) >= 0]
        if found:
            self._held = self._held[: min(found)]
            self.stopped = True
            return
        open_end = max((overlap(self._held, part) for part in self._stop), default=0)
        yield from self._emit(len(self._held) - open_end)

    def flush(self) -> Iterator[str]:
        """What was held back and turned out to be no stop string."""
        yield from self._emit(len(self._held))

    def _decoded(self, token: int) -> str:
        """What became certain; bytes that make no character are left out."""
        backend = self._tokenizer.backend_tokenizer
        try:
            return self._stream.step(backend, token) or ""
        except Exception:  # noqa: BLE001 - the library raises nothing more precise for such bytes
            self._stream = DecodeStream([], self._skip_special_tokens)
            return self._stream.step(backend, token) or ""

    def _emit(self, count: int) -> Iterator[str]:
        piece, self._held = self._held[:count], self._held[count:]
        if piece:
            self.text += piece
            yield piece


def overlap(text: str, words: str) -> int:
    """Length of the longest end of ``text`` that ``words`` begins with and goes on behind."""
    longest = min(len(text), len(words) - 1)
    return next((size for size in range(longest, 0, -1) if words.startswith(text[-size:])), 0)
