"""K/V that decoding keeps: every group holds what its future rows may see, and no more."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from redknot.execution.cache import PromptCache
from redknot.execution.visibility import Visibility
from redknot.heads import retained_tokens
from redknot.kernels.attend import Reach, Rows


@dataclass(slots=True, eq=False)
class _Slab:
    """State of the groups of one layer that share a reach.

    Slots 0 to sink hold the first tokens, the others are a ring over the window: a token takes the
    slot of the one that has just left it. Without a limit the ring is the whole capacity.
    """

    groups: Int[Tensor, "group"]
    reach: Reach
    sink: int
    ring: int
    keys: Float[Tensor, "group slot dim"]
    values: Float[Tensor, "group slot dim"]
    positions: Int[Tensor, "slot"]

    @classmethod
    def cut(
        cls,
        keys: Tensor,
        values: Tensor,
        groups: list[int],
        reach: Reach,
        length: int,
        capacity: int,
    ) -> "_Slab":
        """Take over from a layer's full cache what ``reach`` shows to rows from ``length`` on."""
        limits = [limit for limit in (reach.window, reach.horizon) if limit is not None]
        sink = reach.sink if reach.window is not None else 0
        ring = min([*limits, capacity])
        slots = min(sink + ring, capacity)
        index = torch.tensor(groups, device=keys.device)
        shape = (len(groups), slots, keys.shape[-1])
        positions = torch.full((slots,), -1, dtype=torch.int64, device=keys.device)
        slab = cls(
            index, reach, sink, ring, keys.new_empty(shape), values.new_empty(shape), positions
        )
        kept = retained_tokens(length, reach).to(keys.device)
        where = slab._slots(kept)
        slab.keys[:, where] = keys[index][:, kept]
        slab.values[:, where] = values[index][:, kept]
        slab.positions[where] = kept
        return slab

    def write(self, position: int, key: Tensor, value: Tensor) -> None:
        """Put a new token in the slot of the one that no row sees any more."""
        if self.reach.window is None and self.reach.horizon is None and position >= self.ring:
            raise ValueError(f"position {position} is beyond the room of {self.ring} tokens")
        slot = position if position < self.sink else self.sink + (position - self.sink) % self.ring
        self.keys[:, slot] = key[self.groups]
        self.values[:, slot] = value[self.groups]
        self.positions[slot] = position

    def attend(
        self, position: int, query: Float[Tensor, "group query dim"], scale: float
    ) -> Float[Tensor, "group query dim"]:
        """Attention of the row at ``position`` to all that is held."""
        filled = min(position + 1, len(self.positions))
        mask = None
        if self.reach.horizon is not None and self.sink:
            mask = (self.positions[:filled] > position - self.reach.horizon)[None]
        out = F.scaled_dot_product_attention(
            query[None],
            self.keys[None, :, :filled],
            self.values[None, :, :filled],
            attn_mask=mask,
            scale=scale,
        )
        return out[0]

    def _slots(self, positions: Int[Tensor, "token"]) -> Int[Tensor, "token"]:
        ring = self.sink + (positions - self.sink) % self.ring
        return torch.where(positions < self.sink, positions, ring)


class RetainedCache:
    """What is left of a prompt's K/V once only decoding is to come; grows token by token."""

    def __init__(self, cache: PromptCache, sight: Visibility) -> None:
        self.length = cache.length
        capacity = cache.keys.shape[2]
        self._layers = [
            self._cut(cache.keys[layer], cache.values[layer], reaches, cache.length, capacity)
            for layer, reaches in enumerate(sight.decode)
        ]

    def write(
        self,
        layer: int,
        rows: Rows,
        key: Float[Tensor, "group 1 dim"],
        value: Float[Tensor, "group 1 dim"],
        publish: Bool[Tensor, "group row"] | None = None,
    ) -> None:
        """Append the state of one row."""
        if len(rows) != 1 or rows.first != self.length or publish is not None:
            raise ValueError("a retained cache grows by one token at its end")
        for slab in self._layers[layer]:
            slab.write(rows.first, key[:, 0], value[:, 0])

    def attend(
        self,
        layer: int,
        query: Float[Tensor, "query_head 1 dim"],
        rows: Rows,
        sight: Visibility,
        *,
        scale: float,
        row_block: int | None = None,
    ) -> Float[Tensor, "1 query_head*dim"]:
        """Attention of one row; ``sight`` was settled when the cache was cut."""
        groups = sum(len(slab.groups) for slab in self._layers[layer])
        grouped = query.view(groups, -1, query.shape[-1])
        out = torch.empty_like(grouped)
        for slab in self._layers[layer]:
            out[slab.groups] = slab.attend(rows.first, grouped[slab.groups], scale)
        return out.reshape(1, -1)

    @property
    def num_bytes(self) -> int:
        """Size of all that is held."""
        slabs = [slab for layer in self._layers for slab in layer]
        return sum(2 * slab.keys.numel() * slab.keys.element_size() for slab in slabs)

    @staticmethod
    def _cut(
        keys: Tensor, values: Tensor, reaches: Sequence[Reach], length: int, capacity: int
    ) -> list[_Slab]:
        slabs = []
        for reach in dict.fromkeys(reaches):
            groups = [group for group, other in enumerate(reaches) if other == reach]
            slabs.append(_Slab.cut(keys, values, groups, reach, length, capacity))
        return slabs
