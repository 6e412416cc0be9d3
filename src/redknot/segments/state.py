"""Segment state: what was computed for a run of tokens once, alone, by the dense model."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class SegmentState:
    """State of a run of tokens. Immutable once made; shared by all who hold it."""

    token_ids: Int[Tensor, "token"]
    planes: dict[str, Float[Tensor, "layer group token dim"]]
    "Un-rotated `key`, and `value`."

    def __len__(self) -> int:
        return self.token_ids.shape[0]

    @classmethod
    def empty(
        cls,
        token_ids: Int[Tensor, "token"],
        layers: int,
        groups: int,
        dim: int,
        like: Tensor,
    ) -> "SegmentState":
        """Planes to be filled by a builder, of the type and on the device of ``like``."""
        shape = (layers, groups, len(token_ids), dim)
        return cls(token_ids, {name: like.new_empty(shape) for name in ("key", "value")})

    @property
    def num_bytes(self) -> int:
        """Size of the planes."""
        return sum(plane.numel() * plane.element_size() for plane in self.planes.values())

    def checksum(self) -> int:
        """A sum over all bits of the planes: any single change alters it, at memory speed."""
        total = 0
        for plane in self.planes.values():
            words = (
                plane.contiguous()
                .view(-1)
                .view(torch.int32 if plane.element_size() == 4 else torch.int16)
            )
            total = (total * 31 + int(words.sum(dtype=torch.int64))) % (1 << 63)
        return total

    def fits(self, shape: tuple[int, int, int], dtype: torch.dtype) -> bool:
        """Whether the planes are whole and of ``(layers, groups, dim)`` and ``dtype``."""
        layers, groups, dim = shape
        return set(self.planes) == {"key", "value"} and all(
            plane.shape == (layers, groups, len(self), dim) and plane.dtype == dtype
            for plane in self.planes.values()
        )
