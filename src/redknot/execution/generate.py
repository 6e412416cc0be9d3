"""Decoding a prefilled prompt: token by token, until an end token or the limit."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

from redknot.errors import InputError
from redknot.execution.batch import DecodeBatch
from redknot.execution.executor import Executor, Prefilled


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How tokens are chosen."""

    max_tokens: int = 64
    temperature: float = 0.0
    "0 takes the likeliest token."
    top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.max_tokens < 1 or self.temperature < 0 or not 0 < self.top_p <= 1:
            raise InputError(f"max_tokens from 1, temperature from 0, top_p in (0, 1]: {self}")


def decode(
    executor: Executor, prefilled: Prefilled, end_token_ids: frozenset[int], sampling: Sampling
) -> Iterator[int]:
    """Yield new tokens, the end token last if one came. The K/V kept is what rows still see."""
    chooser = _Chooser(sampling, executor.adapter.device)
    logits = prefilled.logits
    batch = DecodeBatch(executor, 1, prefilled.cache.length + sampling.max_tokens)
    batch.add(prefilled)
    for count in range(1, sampling.max_tokens + 1):
        token = chooser(logits)
        yield token
        if token in end_token_ids or count == sampling.max_tokens:
            return
        logits = batch.step([token])[0]


class _Chooser:
    """Picks a token from logits."""

    def __init__(self, sampling: Sampling, device: torch.device) -> None:
        self._greedy = sampling.temperature == 0
        self._warp = LogitsProcessorList()
        self._generator = torch.Generator(device)
        if self._greedy:
            return
        self._warp.append(TemperatureLogitsWarper(float(sampling.temperature)))
        if sampling.top_p < 1:
            self._warp.append(TopPLogitsWarper(sampling.top_p))
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed)

    def __call__(self, logits: Float[Tensor, "vocab"]) -> int:
        if self._greedy:
            return int(logits.argmax())
        warped = self._warp(torch.empty(1, 0, dtype=torch.int64), logits[None])[0]
        return int(torch.multinomial(warped.softmax(-1), 1, generator=self._generator))
