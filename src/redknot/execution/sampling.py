"""How a token is chosen from logits."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

from redknot.errors import InputError

GREEDY_BELOW = 1e-5
"Temperatures that are none: the likeliest token is taken."


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


class Chooser:
    """Picks a token from logits; with a seed the same ones every time."""

    def __init__(self, sampling: Sampling, device: torch.device) -> None:
        self.greedy = sampling.temperature < GREEDY_BELOW
        self._warp = LogitsProcessorList()
        self._generator = torch.Generator(device)
        if self.greedy:
            return
        self._warp.append(TemperatureLogitsWarper(float(sampling.temperature)))
        if sampling.top_p < 1:
            self._warp.append(TopPLogitsWarper(sampling.top_p))
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed)

    def __call__(self, logits: Float[Tensor, "vocab"]) -> int:
        """The next token."""
        if self.greedy:
            return int(logits.argmax())
        scores = logits.float() - logits.max()  # so that no temperature makes one infinite
        warped = self._warp(torch.empty(1, 0, dtype=torch.int64), scores[None])[0]
        noise = torch.empty_like(warped).exponential_(generator=self._generator)
        return int((warped.softmax(-1) / noise).argmax())  # a draw that no value can make fail
