"""Requests that decode together: one new row each a step, replayed as a CUDA graph on a GPU."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from redknot.execution.executor import Executor, Prefilled
from redknot.execution.layer import decode_layer
from redknot.kernels.attend import DecodePlan, Reach
from redknot.kernels.paging import PagedKV
from redknot.kernels.upload import upload

SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"Requests of a captured step; a step of fewer runs some idle slots."
EAGER_STEPS = 1
"Steps of a size that run before it is captured: kernels compile in them."
REPLAN_STEPS = 256
"Steps after which the split of keys is balanced anew; it stays right in between."


@dataclass(eq=False, slots=True)
class _Size:
    """What a step of some number of slots needs."""

    plans: list[DecodePlan]
    "One for each layer."
    steps: int = 0
    planned_at: int = 0
    captured: tuple[torch.cuda.CUDAGraph, Float[Tensor, "slot vocab"]] | None = None

    @property
    def is_stale(self) -> bool:
        """Whether the plans were made for lengths of long ago."""
        return self.steps - self.planned_at >= REPLAN_STEPS

    def replan(self, fresh: list[DecodePlan]) -> bool:
        """Balance anew, in place; False where requests see differently than those before."""
        pairs = list(zip(self.plans, fresh, strict=True))
        if any(old.pattern != new.pattern for old, new in pairs):
            return False
        for old, new in {id(old): (old, new) for old, new in pairs}.values():
            old.refill(new)
        self.planned_at = self.steps
        return True


@dataclass(eq=False)
class DecodeBatch:
    """Up to ``max_requests`` prefilled prompts of up to ``max_tokens`` tokens each.

    Requests may see by different head maps. They are numbered from 0 without gaps; `remove` moves
    the last one into the gap. Pages that no later token sees go back to the pool as they fall out
    of sight.
    """

    executor: Executor
    max_requests: int
    max_tokens: int
    copied: bool = False
    "As in `PromptCache`."
    requests: list[Prefilled] = field(default_factory=list, init=False)
    lengths: list[int] = field(default_factory=list, init=False)
    "Tokens of each request whose K/V are written."

    def __post_init__(self) -> None:
        adapter, storage = self.executor.adapter, self.executor.storage
        self._layers, self._groups = len(adapter.layers), adapter.layers[0].shape.num_groups
        pages = -(-self.max_tokens // storage.page_size)
        self._reserve_scratch()
        self._tables = torch.full(
            (self._layers, self.max_requests * self._groups, pages),
            self._scratch,
            dtype=torch.int32,
            device=adapter.device,
        )
        self._tokens = torch.zeros(self.max_requests, dtype=torch.int64, device=adapter.device)
        self._positions = torch.zeros(self.max_requests, dtype=torch.int32, device=adapter.device)
        self._sizes: dict[int, _Size] = {}
        self._views: dict[tuple[int, int], PagedKV] = {}
        self._planes = storage.planes["key"]

    def add(self, prefilled: Prefilled) -> int:
        """Take in a request, whose cache then only goes forward; returns its number."""
        if len(self.requests) == self.max_requests:
            raise ValueError(f"the batch holds {self.max_requests} requests")
        if prefilled.cache.length > self.max_tokens:
            length = prefilled.cache.length
            raise ValueError(f"a prompt of {length} tokens in a batch of {self.max_tokens} tokens")
        self.requests.append(prefilled.retain())
        self.lengths.append(prefilled.cache.length)
        self._show(len(self.requests) - 1)
        self._unplan()
        return len(self.requests) - 1

    def remove(self, number: int) -> Prefilled:
        """Let go of a request, which may go on elsewhere; the last one gets its number."""
        if not 0 <= number < len(self.requests):
            raise ValueError(f"no request {number} among {len(self.requests)}")
        gone, last = self.requests[number], len(self.requests) - 1
        gone.cache.trim(self.lengths[number])
        self.requests[number], self.lengths[number] = self.requests[last], self.lengths[last]
        del self.requests[last], self.lengths[last]
        if number < last:
            self._show(number)
        self._table(last).fill_(self._scratch)
        self._unplan()
        return gone

    @torch.inference_mode()
    def step(self, tokens: Sequence[int]) -> Float[Tensor, "request vocab"]:
        """Append one token to every request; logits behind each, valid until the next step."""
        count = len(self.requests)
        if len(tokens) != count or not count:
            raise ValueError(f"{len(tokens)} tokens for {count} requests")
        self._make_room()
        device = self._tokens.device
        self._tokens[:count].copy_(upload(torch.tensor(tokens), device))
        positions = torch.tensor(self.lengths, dtype=torch.int32)
        self._positions[:count].copy_(upload(positions, device))
        logits = self._run(self._slots(count))
        self.lengths = [length + 1 for length in self.lengths]
        return logits[:count]

    def _slots(self, count: int) -> int:
        """Requests of a step that ``count`` take part in: more only where it is captured."""
        if self._tokens.device.type != "cuda":
            return count
        size = min((size for size in SIZES if size >= count), default=count)
        return min(size, self.max_requests)

    def _run(self, size: int) -> Float[Tensor, "slot vocab"]:
        if self.executor.storage.planes["key"] is not self._planes:  # the storage has grown
            self._planes = self.executor.storage.planes["key"]
            self._sizes.clear()
            self._views.clear()
        state = self._sizes.get(size)
        if state is None or (state.is_stale and not state.replan(self._plans(size))):
            state = self._sizes[size] = _Size(self._plans(size))
        state.steps += 1
        if self._tokens.device.type != "cuda" or state.steps <= EAGER_STEPS:
            return self._forward(size, state.plans)
        if state.captured is None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                logits = self._forward(size, state.plans)
            state.captured = graph, logits
        graph, logits = state.captured
        graph.replay()
        return logits

    def _forward(self, size: int, plans: list[DecodePlan]) -> Float[Tensor, "slot vocab"]:
        adapter, parts = self.executor.adapter, self.executor.parts
        positions = self._positions[:size]
        angles = adapter.rotary.table(positions)
        hidden = adapter.embed(self._tokens[:size])
        for index, layer in enumerate(adapter.layers):
            kv, plan = self._paged(index, size), plans[index]
            hidden = decode_layer(layer, kv, plan, positions, angles, hidden, parts)
        return adapter.logits(hidden)

    def _plans(self, size: int) -> list[DecodePlan]:
        """Of every layer, for the present lengths; layers that see alike are planned once."""
        lengths = [length + 1 for length in self.lengths] + [0] * (size - len(self.lengths))
        made: dict[tuple[tuple[Reach, ...], ...], DecodePlan] = {}
        plans = []
        for layer in range(self._layers):
            reaches = tuple(request.sight.decode[layer] for request in self.requests)
            reaches += reaches[:1] * (size - len(reaches))
            if reaches not in made:
                made[reaches] = DecodePlan.of(lengths, reaches, self._tokens.device)
            plans.append(made[reaches])
        return plans

    def _unplan(self) -> None:
        """Plan anew at the next step of any size."""
        for state in self._sizes.values():
            state.planned_at = state.steps - REPLAN_STEPS

    def _make_room(self) -> None:
        """Pages for the tokens to come, and back to the pool what none of them sees."""
        page_size = self.executor.storage.page_size
        for number, (request, length) in enumerate(zip(self.requests, self.lengths, strict=True)):
            if length >= self.max_tokens:
                raise ValueError(f"request {number} has reached {self.max_tokens} tokens")
            if length == request.cache.length:
                request.cache.reserve((length // page_size + 1) * page_size)
                request.cache.evict(position=length)
                self._show(number)

    def _show(self, number: int) -> None:
        """Write the page table of a request where the kernels read it."""
        table = self.requests[number].cache.table
        self._table(number)[:, :, : table.shape[2]] = table
        self._views.clear()

    def _table(self, number: int) -> Int[Tensor, "layer group page"]:
        return self._tables[:, number * self._groups : (number + 1) * self._groups]

    def _paged(self, index: int, size: int) -> PagedKV:
        """K/V of one layer over the first ``size`` slots."""
        view = self._views.get((index, size))
        if view is None:
            planes, table = self.executor.storage.planes, self._tables[index, : size * self._groups]
            keys, values = planes["key"], planes["value"]
            view = PagedKV(keys, values, table, self._groups, copied=self.copied)
            self._views[index, size] = view
        return view

    def _reserve_scratch(self) -> None:
        """A page that idle slots write to and nobody reads."""
        storage = self.executor.storage
        if not storage.pool.num_free and storage.grows:
            storage.grow(1)
        page = storage.pool.allocate(1)
        self._scratch = int(page[0])
        weakref.finalize(self, storage.pool.free, page)
