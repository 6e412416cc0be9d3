"""K/V of one prompt, rotated to their positions: written by relocation and by every pass."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from redknot.execution.visibility import Visibility
from redknot.kernels.attend import Rows, attend
from redknot.kernels.relocate import rotate
from redknot.models import Adapter
from redknot.segments import SegmentState


@dataclass(slots=True, eq=False)
class PromptCache:
    """Keys and values of positions 0 to capacity. The only copy a request makes."""

    keys: Float[Tensor, "layer group capacity dim"]
    values: Float[Tensor, "layer group capacity dim"]
    length: int = 0
    "Positions that hold state."

    @classmethod
    def allocate(cls, adapter: Adapter, capacity: int) -> "PromptCache":
        """Room for ``capacity`` tokens, contents undefined."""
        first = adapter.layers[0].shape
        shape = (len(adapter.layers), first.num_groups, capacity, first.head_dim)
        keys, values = (
            torch.empty(shape, dtype=adapter.dtype, device=adapter.device) for _ in range(2)
        )
        return cls(keys, values)

    def place(self, adapter: Adapter, state: SegmentState, start: int, tokens: int) -> None:
        """Relocate the first ``tokens`` of ``state`` to ``start`` by one rotation."""
        stop = start + tokens
        cosine, sine = adapter.rotary.table(torch.arange(start, stop, device=adapter.device))
        key, value = (
            state.planes[name][:, :, :tokens].to(adapter.device, non_blocking=True)
            for name in ("key", "value")
        )
        self.keys[:, :, start:stop] = rotate(key, cosine, sine)
        self.values[:, :, start:stop] = value

    def first(
        self, tokens: int
    ) -> tuple[Float[Tensor, "layer group tokens dim"], Float[Tensor, "layer group tokens dim"]]:
        """Views of keys and values of the first ``tokens``."""
        return self.keys[:, :, :tokens], self.values[:, :, :tokens]

    def write(
        self,
        layer: int,
        rows: Rows,
        key: Float[Tensor, "group row dim"],
        value: Float[Tensor, "group row dim"],
        publish: Bool[Tensor, "group row"] | None = None,
    ) -> None:
        """Replace the state of ``rows``, in each group only where ``publish`` says so."""
        for plane, fresh in ((self.keys[layer], key), (self.values[layer], value)):
            if publish is not None:
                for group, mask in enumerate(publish.to(plane.device)):
                    plane[group, rows.device[mask]] = fresh[group, mask]
            elif rows.consecutive:
                plane[:, rows.first : rows.last + 1] = fresh
            else:
                plane[:, rows.device] = fresh

    def attend(
        self,
        layer: int,
        query: Float[Tensor, "query_head row dim"],
        rows: Rows,
        sight: Visibility,
        *,
        scale: float,
        row_block: int | None = None,
    ) -> Float[Tensor, "row query_head*dim"]:
        """Attention of ``rows``, each under the reach of its phase."""
        split = rows.before(sight.border)
        parts = []
        for start, stop, reaches in (
            (0, split, sight.prefill[layer]),
            (split, len(rows), sight.decode[layer]),
        ):
            if start < stop:
                part = rows.between(start, stop)
                seen = part.last + 1
                parts.append(
                    attend(
                        query[:, start:stop],
                        self.keys[layer, :, :seen],
                        self.values[layer, :, :seen],
                        part,
                        reaches,
                        scale=scale,
                        row_block=row_block,
                    )
                )
        return parts[0] if len(parts) == 1 else torch.cat(parts)
