"""A tokenised prompt with its spans."""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens ``start`` to ``stop`` that may be reused wherever they stand."""

    start: int
    stop: int
    title: str = ""

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """Token ids of one request, tokenised once, and what they consist of."""

    token_ids: Int[Tensor, "token"]
    spans: tuple[Span, ...]
    "Sorted, without overlap."
    probe: tuple[int, int]
    "(start, stop) of the last user text."

    def __len__(self) -> int:
        return self.token_ids.shape[0]

    @classmethod
    def of_ids(
        cls,
        token_ids: list[int],
        spans: list[tuple[int, int]],
        probe: tuple[int, int] | None = None,
    ) -> "Prompt":
        """A prompt whose spans the caller knows; the probe defaults to what follows them."""
        ids = torch.tensor(token_ids, dtype=torch.int64)
        end = max((stop for _, stop in spans), default=0)
        start = min(max(end, len(token_ids) - 128), len(token_ids) - 1)
        return cls(ids, tuple(Span(*span) for span in spans), probe or (start, len(token_ids)))
