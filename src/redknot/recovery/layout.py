"""The layout of one prompt: what is known of each token before anything is computed."""

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Int
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Layout:
    """Where the stored segments of a prompt stand; all tensors are on the host."""

    num_tokens: int
    exact: int
    "Tokens at the start whose state is exactly dense's: never computed again."
    segments: tuple[tuple[int, int], ...]
    "(start, stop) of every segment with stored state, in order."
    context_end: int
    "End of the last segment, stored or not: rows from here on belong to the decode phase."
    probe: tuple[int, int]
    "(start, stop) of the tokens whose attention ranks the others."

    @cached_property
    def reusable(self) -> Bool[Tensor, "token"]:
        """Tokens that may keep their stored state."""
        mask = torch.zeros(self.num_tokens, dtype=torch.bool)
        for start, stop in self.segments:
            mask[start:stop] = True
        mask[: self.exact] = False
        mask[-1] = False  # the first new token comes from the last row
        return mask

    @cached_property
    def stored(self) -> Int[Tensor, "token"]:
        """Positions of the reusable tokens."""
        return self.reusable.nonzero().flatten()

    @cached_property
    def fresh(self) -> Int[Tensor, "token"]:
        """Positions that are computed whatever the policy: neither exact nor reusable."""
        mask = ~self.reusable
        mask[: self.exact] = False
        return mask.nonzero().flatten()

    @cached_property
    def every(self) -> Int[Tensor, "token"]:
        """All positions behind the exact prefix."""
        return torch.arange(self.exact, self.num_tokens)

    @property
    def common_prefix(self) -> int:
        """Tokens before the first stored segment whose exact state is known: what any engine with
        a prefix cache would not compute either, and what FLOPs shares leave out."""
        return min(self.exact, self.segments[0][0]) if self.segments else 0

    @property
    def probe_follows_context(self) -> bool:
        """Whether the question pass itself runs the probe rows after all segments."""
        return self.probe[0] >= self.context_end

    def limited(self, *, exact: int, segments: bool) -> "Layout":
        """The same prompt with ``exact`` known first tokens, and with or without its segments."""
        return Layout(
            num_tokens=self.num_tokens,
            exact=exact,
            segments=self.segments if segments else (),
            context_end=self.context_end,
            probe=self.probe,
        )
