"""The tensors behind a page pool: one plane for each thing that a token's state consists of."""

from collections.abc import Callable, Mapping

import numpy as np
import torch
from jaxtyping import Float, Int32
from torch import Tensor

from redknot.segpaged.pool import PagePool


class PageStorage:
    """Planes [page, page_size, width] and the pool that counts their pages.

    Grows when a request needs more; what is given back stays for the next one.
    """

    def __init__(
        self,
        widths: Mapping[str, int],
        *,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        num_pages: int = 0,
        grows: bool = True,
    ) -> None:
        """``grows`` tells requests that they may call `grow` when pages run out."""
        if page_size < 1:
            raise ValueError(f"pages of {page_size} tokens")
        self.pool = PagePool(num_pages)
        self.grows = grows
        self.reclaim: Callable[[int], int] = lambda num_pages: 0
        "Asked to free pages when a storage that does not grow has none left; how many became free."
        self.page_size = page_size
        self.planes = {
            name: _plane((num_pages, page_size, width), dtype, device)
            for name, width in widths.items()
        }

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in all planes."""
        return sum(
            self.page_size * plane.shape[2] * plane.element_size() for plane in self.planes.values()
        )

    @property
    def num_bytes_used(self) -> int:
        """Bytes of the pages that somebody holds."""
        return self.pool.num_used * self.page_bytes

    def grow(self, num_pages: int) -> None:
        """Add pages; nothing is copied while no page is held."""
        keep = self.pool.num_pages if self.pool.num_used else 0
        self.pool.grow(num_pages)
        for name in list(self.planes):
            old = self.planes.pop(name)
            shape, dtype, device = old.shape[1:], old.dtype, old.device
            if not keep:
                del old  # before the new one is made
            self.planes[name] = _plane((self.pool.num_pages, *shape), dtype, device)
            if keep:
                self.planes[name][:keep] = old

    def copy(self, sources: Int32[np.ndarray, "page"], targets: Int32[np.ndarray, "page"]) -> None:
        """Copy pages inside every plane."""
        if not len(sources):
            return
        for plane in self.planes.values():
            source, target = (
                torch.from_numpy(pages.astype(np.int64)).to(plane.device)
                for pages in (sources, targets)
            )
            plane[target] = plane[source]


def _plane(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Float[Tensor, "page token width"]:
    """Zeros on a GPU, whose kernels read whole pages and need finite values there."""
    make = torch.empty if device.type == "cpu" else torch.zeros
    return make(shape, dtype=dtype, device=device)
