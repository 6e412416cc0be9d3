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

    def in_host_memory(self) -> "SegmentState":
        """The same state in page-locked memory, from where a GPU copies it without the host."""
        locked = torch.cuda.is_available()
        planes = {
            name: torch.empty_like(plane, device="cpu", pin_memory=locked).copy_(plane)
            for name, plane in self.planes.items()
        }
        return SegmentState(self.token_ids, planes)

    def checksum(self) -> int:
        """A sum over all bits of the planes: any single change alters it, at memory speed."""
        sums = []
        for plane in self.planes.values():
            flat = plane.contiguous().view(-1)
            words = flat.view(torch.int64) if flat.nbytes % 8 == 0 else flat.view(torch.uint8)
            sums.append(words.sum(dtype=torch.int64))
        total = 0
        for one in torch.stack(sums).tolist():
            total = total * 31 + one
        return total % (1 << 64)

    def fits(self, shape: tuple[int, int, int], dtype: torch.dtype) -> bool:
        """Whether the planes are whole and of ``(layers, groups, dim)`` and ``dtype``."""
        layers, groups, dim = shape
        return set(self.planes) == {"key", "value"} and all(
            plane.shape == (layers, groups, len(self), dim) and plane.dtype == dtype
            for plane in self.planes.values()
        )
