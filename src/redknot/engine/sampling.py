"""The next tokens of all choices of a step: greedy ones at once, the others one by one."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import llguidance
import llguidance.hf
import llguidance.torch
import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from redknot.engine.faults import FAULTS, told
from redknot.engine.messages import Grammar, SamplingSpec, TokenInfo
from redknot.errors import InputError
from redknot.execution.sampling import Chooser, Sampling

SPACING: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"As Python writes JSON: with free blanks a model may write nothing else."


@dataclass(frozen=True, slots=True)
class NoToken:
    """A choice that cannot go on."""

    message: str
    "Why, in one line."


Picked = TokenInfo | NoToken


class Picker:
    """Chooses for one choice of one request: sampling, grammar, and what is told about it."""

    def __init__(
        self, spec: SamplingSpec, choice: int, device: torch.device, grammars: "Grammars"
    ) -> None:
        seed = None if spec.seed is None else (spec.seed + choice) % (1 << 63)
        sampling = Sampling(
            max_tokens=spec.max_tokens, temperature=spec.temperature, top_p=spec.top_p, seed=seed
        )
        self.logprobs = spec.logprobs
        self._choose = Chooser(sampling, device)
        self._matcher = None if spec.grammar is None else grammars.matcher(spec.grammar)

    @property
    def is_plain(self) -> bool:
        """Whether the likeliest token is all that is asked for."""
        return self._choose.greedy and self._matcher is None and self.logprobs is None

    def pick(self, logits: Float[Tensor, "vocab"]) -> TokenInfo:
        """The next token; `RuntimeError` where the grammar has lost its way."""
        if self._matcher is not None:
            logits = self._allowed(self._matcher, logits)
        token = self._choose(logits)
        if self._matcher is not None:
            self._matcher.consume_token(token)
            _check(self._matcher)
        if self.logprobs is None:
            return TokenInfo(token)
        known = logits.float().log_softmax(-1)
        best = known.topk(self.logprobs)
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        top = tuple(pair for pair in pairs if math.isfinite(pair[1]))  # others break the grammar
        return TokenInfo(token, float(known[token]), top)

    def _allowed(
        self, matcher: llguidance.LLMatcher, logits: Float[Tensor, "vocab"]
    ) -> Float[Tensor, "vocab"]:
        """``logits`` with everything that breaks the grammar at minus infinity."""
        mask = llguidance.torch.allocate_token_bitmask(1, len(logits))
        llguidance.torch.fill_next_token_bitmask(matcher, mask)
        _check(matcher)  # its limits show only now; then all but an end is forbidden
        allowed = logits[None].clone()
        llguidance.torch.apply_token_bitmask_inplace(allowed, mask.to(logits.device))
        return allowed[0]


class Grammars:
    """Compiles grammars for one tokenizer, once it is needed."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, end_token_ids: frozenset[int]
    ) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._end = sorted(end_token_ids)

    @cached_property
    def _vocabulary(self) -> llguidance.LLTokenizer:
        return llguidance.hf.from_tokenizer(
            self._tokenizer, n_vocab=self._vocab_size, eos_token=self._end or None
        )

    def matcher(self, grammar: Grammar) -> llguidance.LLMatcher:
        """A matcher at the start of ``grammar``; `InputError` if it cannot be followed."""
        schema = grammar.schema if grammar.kind == "json_schema" else '{"type": "object"}'
        try:
            compiled = llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=SPACING)
            matcher = llguidance.LLMatcher(self._vocabulary, compiled)
        except ValueError as error:
            raise InputError(f"response_format: {_first_line(error)}") from error
        if matcher.is_error():
            raise InputError(f"response_format: {_first_line(matcher.get_error())}")
        return matcher


def pick_all(pickers: Sequence[Picker], logits: Float[Tensor, "choice vocab"]) -> list[Picked]:
    """The next token of each choice; the device is waited for once for all greedy ones.

    What goes wrong with one choice is that choice's alone.
    """
    best = logits.argmax(-1).tolist()
    return [
        TokenInfo(best[row]) if picker.is_plain else _pick(picker, logits[row])
        for row, picker in enumerate(pickers)
    ]


def _pick(picker: Picker, logits: Float[Tensor, "vocab"]) -> Picked:
    try:
        return picker.pick(logits)
    except FAULTS as error:
        return NoToken(told(error))


def _check(matcher: llguidance.LLMatcher) -> None:
    if matcher.is_error():
        raise RuntimeError(f"response_format: {_first_line(matcher.get_error())}")


def _first_line(error: object) -> str:
    return (str(error).splitlines() or ["not a grammar"])[0]
