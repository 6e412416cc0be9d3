"""The question pass: which context tokens does the probe attend to?

Its rows are few, so that launching its kernels one by one takes longer than running them: on a GPU
a pass of a shape that was seen before is replayed as a CUDA graph.
"""

from collections.abc import Generator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from redknot.execution.cache import Pages, PromptCache
from redknot.execution.layer import Placed, Trip, attention, finish
from redknot.execution.turns import drained
from redknot.kernels.attend import Rows
from redknot.kernels.paging import ABSENT, PagedKV
from redknot.kernels.score import column_mass
from redknot.kernels.upload import upload
from redknot.models import Adapter
from redknot.recovery.flops import question_rows
from redknot.recovery.layout import Layout
from redknot.segpaged import PageStorage

Mass = Float[Tensor, "layer group token"]

ROWS = 64
"Captured passes hold a multiple of this many rows before the probe, of it, and behind it."
MOST_ROWS = 256
MOST_TOKENS = 1 << 16
"Longer passes keep a GPU busy without a graph."
MOST_GRAPHS = 8
"Shapes that are kept captured, each with the scores of its tokens in all layers."


class Question(NamedTuple):
    """The rows of one pass, on the host."""

    token_ids: Int[Tensor, "row"]
    positions: Int[Tensor, "row"]
    first: int
    "Index of the probe's first row."
    stop: int
    "Index behind its last."

    @classmethod
    def of(cls, token_ids: Int[Tensor, "token"], layout: Layout) -> "Question":
        """All tokens without stored state; a copy of the probe behind the prompt if it needs one.

        It does where it stands before some segment.
        """
        positions = question_rows(layout)
        start, stop = layout.probe
        if not layout.probe_follows_context:
            token_ids = torch.cat([token_ids, token_ids[start:stop]])
            start, stop = layout.num_tokens, layout.num_tokens + stop - start
        first, last = torch.searchsorted(positions, torch.tensor([start, stop])).tolist()
        return cls(token_ids[positions], positions, first, last)


class ProbePass:
    """The question passes of one executor; rows see everything.

    A pass leaves the K/V of its rows in the cache; every plan writes these positions again before
    it reads them.
    """

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self._captured: dict[_Shape, _Captured] = {}

    def mass(
        self, trip: Trip, cache: PromptCache, token_ids: Int[Tensor, "token"], layout: Layout
    ) -> Generator[int, None, Mass]:
        """Mean attention probability of the probe's rows on every token of the prompt.

        ``cache`` is that of ``trip``. Yields behind every layer how many rows it had.
        """
        question = Question.of(token_ids, layout)
        cache.reserve(int(question.positions[-1]) + 1)
        shape = _Shape.of(question, layout.num_tokens)
        device = self._adapter.device
        if trip.impl == "auto" and shape.fits(self._adapter):
            captured = self._capture(shape, trip, cache, question)
            return captured.replay(cache, question)[..., : layout.num_tokens]
        placed = Placed.at(self._adapter, question.positions)
        mass = self._empty_mass(layout.num_tokens)
        ids = upload(question.token_ids, device)
        probe = slice(question.first, question.stop)
        yield from score_rows(self._adapter, trip, placed, ids, probe, mass)
        return mass

    def _empty_mass(self, tokens: int) -> Mass:
        groups = self._adapter.layers[0].shape.num_groups
        shape = len(self._adapter.layers), groups, tokens
        return torch.zeros(shape, device=self._adapter.device)

    def _capture(
        self, shape: "_Shape", trip: Trip, cache: PromptCache, question: Question
    ) -> "_Captured":
        """The graph of passes of ``shape``; made anew when the planes that it reads have grown."""
        known = self._captured.get(shape)
        if known is None or not known.reads(cache.storage):
            mass = self._empty_mass(shape.tokens)
            known = _Captured(self._adapter, trip, shape, mass, cache, question)
            self._captured[shape] = known
        if len(self._captured) > MOST_GRAPHS:
            del self._captured[next(iter(self._captured))]
        return known


def score_rows(
    adapter: Adapter,
    trip: Trip,
    placed: Placed,
    token_ids: Int[Tensor, "row"],
    probe: slice,
    mass: Mass,
    counted: Bool[Tensor, "row"] | None = None,
) -> Generator[int, None, None]:
    """Run rows through all layers and write to ``mass`` what those of the ``probe`` attend to.

    Only the ``counted`` ones add to it, if that is given; the mean is over all of them. Yields
    behind every layer how many rows it had.
    """
    rows = placed.rows.between(probe.start, probe.stop)
    hidden = adapter.embed(token_ids)
    for index, layer in enumerate(adapter.layers):
        found = attention(trip, index, layer, placed, hidden, return_lse=True)
        if found.lse is None:
            raise RuntimeError("attention was asked for its log-sum-exp")
        query, lse = found.query[:, probe], found.lse[:, probe]
        if counted is not None:
            lse = lse.masked_fill(~counted, float("inf"))
        shape, kv = layer.shape, trip.cache.layer(index)
        scored = column_mass(query, kv, rows, lse, scale=shape.scale, horizon=shape.horizon)
        tokens = min(scored.shape[1], mass.shape[2])
        mass[index, :, :tokens] = scored[:, :tokens]
        trip.spent_on("score")
        if index < len(adapter.layers) - 1:
            hidden = finish(layer, hidden, found.out, parts=trip.parts)
            trip.spent_on("finish")
        yield len(hidden)


@dataclass(frozen=True, slots=True)
class _Shape:
    """Rows of a captured pass before the probe, of it and behind it, and tokens of its prompt."""

    rows: tuple[int, int, int]
    tokens: int

    @classmethod
    def of(cls, question: Question, tokens: int) -> "_Shape":
        borders = 0, question.first, question.stop, len(question.positions)
        before, probe, behind = (-(-(b - a) // ROWS) * ROWS for a, b in pairwise(borders))
        tokens = max(tokens, int(question.positions[-1]) + 1)
        return cls((before, probe, behind), 1 << (tokens - 1).bit_length())

    def fits(self, adapter: Adapter) -> bool:
        """Whether such a pass is worth a graph, and needs nothing of its positions on the host."""
        small = sum(self.rows) <= MOST_ROWS and self.tokens <= MOST_TOKENS
        plain = all(layer.shape.horizon is None for layer in adapter.layers)
        return adapter.device.type == "cuda" and small and plain

    @property
    def probe(self) -> slice:
        return slice(self.rows[0], self.rows[0] + self.rows[1])

    def filled(self, question: Question) -> Int[Tensor, "row"]:
        """Which row of ``question`` stands in each row; those that are left over repeat another.

        A row that is there twice writes the same state twice.
        """
        borders = 0, question.first, question.stop, len(question.positions)
        parts = [
            torch.arange(stop - count, stop).clamp(min=start)
            for (start, stop), count in zip(pairwise(borders), self.rows, strict=True)
        ]
        return torch.cat(parts)


@dataclass(eq=False)
class _TablePages(Pages):
    """Pages behind one table for all layers that stays where it is."""

    storage: PageStorage
    table: Int[Tensor, "layer group page"]
    views: dict[int, PagedKV] = field(default_factory=dict)

    def layer(self, index: int) -> PagedKV:
        if index not in self.views:
            planes, table = self.storage.planes, self.table[index]
            self.views[index] = PagedKV(planes["key"], planes["value"], table, len(table))
        return self.views[index]


class _Captured:
    """A pass of one shape as a graph; what varies stands in buffers that it reads."""

    def __init__(
        self,
        adapter: Adapter,
        trip: Trip,
        shape: _Shape,
        mass: Mass,
        cache: PromptCache,
        question: Question,
    ) -> None:
        """Run ``question`` as it is, so that all kernels compile and are planned, and record it."""
        device, rows, storage = adapter.device, sum(shape.rows), cache.storage
        self._shape, self._mass, self._planes = shape, mass, storage.planes["key"]
        pages = -(-shape.tokens // storage.page_size)
        self._table = torch.full((*mass.shape[:2], pages), ABSENT, dtype=torch.int32, device=device)
        self._ids = torch.zeros(rows, dtype=torch.int64, device=device)
        self._counted = torch.zeros(shape.rows[1], dtype=torch.bool, device=device)
        self._positions = torch.zeros(rows, dtype=torch.int32, device=device)
        self._load(cache, question)
        trip = replace(trip, cache=_TablePages(storage, self._table), impl="triton", clock=None)
        # Planned for the longest prompt of this shape; kernels read positions where they stand.
        last = torch.arange(shape.tokens - rows, shape.tokens)
        placed = Placed.of(adapter, Rows(last, self._positions))
        self._placed = placed  # the graph reads what is planned in it
        drained(score_rows(adapter, trip, placed, self._ids, shape.probe, mass, self._counted))
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            cosine, sine = adapter.rotary.table(self._positions)
            placed = replace(placed, cosine=cosine, sine=sine)
            drained(score_rows(adapter, trip, placed, self._ids, shape.probe, mass, self._counted))

    def reads(self, storage: PageStorage) -> bool:
        """Whether the graph's planes are those of ``storage``."""
        return storage.planes["key"] is self._planes

    def replay(self, cache: PromptCache, question: Question) -> Mass:
        """Run ``question`` over the pages of ``cache``; a tensor of its own."""
        self._load(cache, question)
        self._graph.replay()
        return self._mass * (self._shape.rows[1] / (question.stop - question.first))

    def _load(self, cache: PromptCache, question: Question) -> None:
        rows = self._shape.filled(question)
        device, probe = self._ids.device, rows[self._shape.probe]
        table = cache.table
        self._table.fill_(ABSENT)
        self._table[:, :, : table.shape[2]] = table
        self._ids.copy_(upload(question.token_ids[rows], device))
        self._positions.copy_(upload(question.positions[rows].to(torch.int32), device))
        repeated = torch.zeros(len(probe), dtype=torch.bool)
        repeated[1:] = probe[1:] == probe[:-1]
        self._counted.copy_(upload(~repeated, device))
