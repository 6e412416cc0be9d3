"""The layout of one prompt: what is known of each token before anything is computed."""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from redknot.kernels.upload import upload

HOST = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class Layout:
    """Where the stored segments of a prompt stand."""

    num_tokens: int
    exact: int
    "Tokens at the start whose state is exactly dense's: never computed again."
    segments: tuple[tuple[int, int], ...]
    "(start, stop) of every segment with stored state, in order."
    context_end: int
    "End of the last segment, stored or not: rows from here on belong to the decode phase."
    probe: tuple[int, int]
    "(start, stop) of the tokens whose attention ranks the others."
    device: torch.device = HOST
    "Where the tensors of this layout are."

    def on(self, device: torch.device) -> "Layout":
        """The same layout with its tensors on ``device``."""
        return self if device == self.device else replace(self, device=device)

    @cached_property
    def reusable(self) -> Bool[Tensor, "token"]:
        """Tokens that may keep their stored state."""
        return upload(self._reusable, self.device)

    @cached_property
    def stored(self) -> Int[Tensor, "token"]:
        """Positions of the reusable tokens."""
        return upload(self._reusable.nonzero().flatten(), self.device)

    @cached_property
    def fresh(self) -> Int[Tensor, "token"]:
        """Positions that are computed whatever the policy: neither exact nor reusable."""
        mask = ~self._reusable
        mask[: self.exact] = False
        return upload(mask.nonzero().flatten(), self.device)

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
        return replace(self, exact=exact, segments=self.segments if segments else ())

    @cached_property
    def _reusable(self) -> Bool[Tensor, "token"]:
        """As `reusable`, on the host."""
        mask = torch.zeros(self.num_tokens, dtype=torch.bool)
        for start, stop in self.segments:
            mask[start:stop] = True
        mask[: self.exact] = False
        mask[-1] = False  # the first new token comes from the last row
        return mask
