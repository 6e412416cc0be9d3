"""K/V of one request in pages: written by relocation and by every pass, given back when unseen."""

import weakref
from abc import ABC, abstractmethod

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Int32
from torch import Tensor

from redknot.kernels.append import append
from redknot.kernels.paging import PagedKV
from redknot.kernels.upload import upload
from redknot.models import Adapter
from redknot.segments import SegmentState
from redknot.segpaged import OutOfPages, PageStorage, PageTable, Retention

PAGE_SIZES = {"cpu": 16, "cuda": 128}
"Tokens of a page by device: FlashAttention-3 reads pages of 128 with the bulk copy engine."


def page_storage(
    adapter: Adapter, page_size: int | None = None, num_pages: int | None = None
) -> PageStorage:
    """Empty storage for the state of ``adapter``; it grows unless ``num_pages`` is given."""
    return PageStorage(
        adapter.layers[0].shape.planes,
        page_size=page_size or PAGE_SIZES[adapter.device.type],
        dtype=adapter.dtype,
        device=adapter.device,
        num_pages=num_pages or 0,
        grows=num_pages is None,
    )


class Pages(ABC):
    """Where rows of one request write their state, and attention reads it."""

    @abstractmethod
    def layer(self, index: int) -> PagedKV:
        """K/V of one layer, as kernels read it."""

    def write(
        self,
        index: int,
        positions: Int[Tensor, "row"],
        key: Float[Tensor, "group row dim"],
        value: Float[Tensor, "group row dim"],
        angles: tuple[Float[Tensor, "row half"], Float[Tensor, "row half"]],
        publish: Bool[Tensor, "group row"] | None = None,
    ) -> None:
        """Rotate un-rotated ``key`` and replace the state of ``positions`` in one layer.

        In each group only where ``publish`` says so.
        """
        append(self.layer(index), key, value, positions, *angles, publish=publish)

    def read(
        self, index: int, positions: Int[Tensor, "row"]
    ) -> tuple[Float[Tensor, "group row dim"], Float[Tensor, "group row dim"]]:
        """Copies of the keys and values of ``positions`` in one layer."""
        kv = self.layer(index)
        pages = kv.table[:, positions // kv.page_size].long()
        return kv.key[pages, positions % kv.page_size], kv.value[pages, positions % kv.page_size]


class PromptCache(Pages):
    """Keys and values of positions 0 to ``length``, rotated: the only copy that a request makes.

    Every (layer, group) has pages of its own. They go back to the pool when nobody will see them
    (`retain`) and when the cache is no longer referenced.
    """

    def __init__(
        self,
        storage: PageStorage,
        num_layers: int,
        num_groups: int,
        table: PageTable | None = None,
        *,
        copied: bool = False,
    ) -> None:
        """With ``copied`` no bit of what is computed over it depends on where its pages stand."""
        self.storage, self.copied = storage, copied
        self._layers, self._groups = num_layers, num_groups
        self._table = table or PageTable(
            storage.pool, num_layers * num_groups, page_size=storage.page_size
        )
        self._retention: Retention | None = None
        self._upload()
        self._release = weakref.finalize(self, self._table.free)

    @classmethod
    def allocate(
        cls,
        adapter: Adapter,
        tokens: int,
        storage: PageStorage | None = None,
        *,
        copied: bool = False,
    ) -> "PromptCache":
        """A cache with room for ``tokens``, in ``storage`` or in one of its own."""
        groups = adapter.layers[0].shape.num_groups
        storage = storage or page_storage(adapter)
        cache = cls(storage, len(adapter.layers), groups, copied=copied)
        cache.reserve(tokens)
        return cache

    @property
    def length(self) -> int:
        """Positions that there is room for, those given back included."""
        return self._table.length

    @property
    def table(self) -> Int[Tensor, "layer group page"]:
        """Pages as kernels read them, on the device; valid until the cache changes its pages."""
        return self._device.view(self._layers, self._groups, -1)

    @property
    def num_bytes(self) -> int:
        """Bytes of the pages that are held."""
        return self._table.num_pages * self.storage.page_bytes

    def reserve(self, tokens: int) -> None:
        """Make room up to position ``tokens``; the storage grows where its pages run out."""
        more, columns = tokens - self.length, self._host.shape[1]
        if more <= 0:
            return
        try:
            change = self._table.append(more)
        except OutOfPages as short:
            missing = short.asked - short.free
            if self.storage.grows:
                self.storage.grow(missing)
            elif self.storage.reclaim(missing) < missing:
                raise
            change = self._table.append(more)
        self.storage.copy(change.sources, change.targets)
        if len(change.sources) or self._table.logical().shape[1] > columns:
            self._upload()

    def trim(self, tokens: int) -> None:
        """Give back room from position ``tokens`` on, of which nothing is written."""
        if tokens < self.length:
            self._table.truncate(tokens)
            self._upload()

    def truncate(self, tokens: int) -> None:
        """Forget positions from ``tokens`` on, if there are any."""
        if tokens >= self.length:
            return
        if self._retention is not None:
            raise ValueError("what decoding no longer sees was given back: there is no way back")
        self.trim(tokens)

    def fork(self) -> "PromptCache":
        """The same state; pages are shared until one of the two grows into them."""
        other = PromptCache(
            self.storage, self._layers, self._groups, self._table.fork(), copied=self.copied
        )
        other._retention = self._retention
        return other

    def pages_by_row(self) -> Int[Tensor, "row"]:
        """Pages that each (layer, group) holds, on the host."""
        return (self._host >= 0).sum(1)

    def holds(self, tokens: int) -> bool:
        """Whether every page of the first ``tokens`` is there."""
        pages = self._host[:, : -(-tokens // self.storage.page_size)]
        return tokens <= self.length and bool((pages >= 0).all())

    @property
    def num_rows(self) -> int:
        """Number of (layer, group) pairs."""
        return self._layers * self._groups

    @property
    def held(self) -> Int32[np.ndarray, "page"]:
        """Pages that are held, those that are shared included."""
        return self._table.held

    def release(self) -> None:
        """Give back all pages now, not when the cache is no longer referenced."""
        self._release()

    def retain(self, retention: Retention) -> None:
        """From now on hold only what rows behind the present ones may see."""
        self._retention = retention
        self.evict()

    def evict(self, retention: Retention | None = None, position: int | None = None) -> None:
        """Give back what no row from ``position`` on sees (None: behind all rows).

        By ``retention``, or by what `retain` said; without either nothing happens.
        """
        retention = retention or self._retention
        position = self.length if position is None else position
        if retention is not None and self._table.keep(retention, position):
            self._upload()

    def layer(self, index: int) -> PagedKV:
        """K/V of one layer, as kernels read it; valid until the cache changes its pages."""
        view = self._views.get(index)
        if view is None or view.key is not self.storage.planes["key"]:  # the storage has grown
            rows = slice(index * self._groups, (index + 1) * self._groups)
            view = self._views[index] = self._paged(rows)
        return view

    def place(
        self, adapter: Adapter, state: SegmentState, start: int, tokens: int, skipped: int = 0
    ) -> None:
        """Relocate the first ``tokens`` of ``state`` to ``start``: one rotation, all layers.

        The first ``skipped`` of them stay as they are.
        """
        positions = torch.arange(start + skipped, start + tokens, device=adapter.device)
        key, value = (
            state.planes[name][:, :, skipped:tokens]
            .to(adapter.device, non_blocking=True)
            .flatten(0, 1)
            for name in ("key", "value")
        )
        append(self._paged(slice(None)), key, value, positions, *adapter.rotary.table(positions))

    def first(
        self, tokens: int
    ) -> tuple[Float[Tensor, "layer group tokens dim"], Float[Tensor, "layer group tokens dim"]]:
        """Copies of keys and values of the first ``tokens``; all of them must be held."""
        pages = self._device[:, : -(-tokens // self.storage.page_size)].long()
        if bool((pages < 0).any()):
            raise ValueError(f"not all of the first {tokens} positions are held")
        key, value = (
            self.storage.planes[name][pages].view(
                self._layers, self._groups, -1, self.storage.planes[name].shape[2]
            )[:, :, :tokens]
            for name in ("key", "value")
        )
        return key, value

    def _paged(self, rows: slice) -> PagedKV:
        planes = self.storage.planes
        return PagedKV(
            planes["key"],
            planes["value"],
            self._device[rows],
            self._groups,
            self._host[rows],
            self.copied,
        )

    def _upload(self) -> None:
        """Show the device the table as it is."""
        self._host = torch.from_numpy(self._table.logical().copy())
        device = next(iter(self.storage.planes.values())).device
        self._device = upload(self._host, device)
        self._views: dict[int, PagedKV] = {}
