"""Pool, tables and arbiter walked at random beside a plain model of positions and references."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.segpaged.test_retention import seen_pages

from redknot.kernels.attend import Reach
from redknot.segpaged import (
    Arbiter,
    FutureRows,
    OutOfPages,
    PagePool,
    PageTable,
    PartitionConfig,
    PartitionsConfig,
    Provenance,
    Retention,
    ScoredEviction,
    Tag,
)

SIZE, ROWS, NUM_PAGES = 4, 3, 60
CONFIG = PartitionsConfig(
    global_=PartitionConfig(share=0.3),
    local=PartitionConfig(share=0.3),
    segment=PartitionConfig(share=0.2, lends=False),
    prefix=PartitionConfig(share=0.2, low=0.5, high=0.75),
)
REACHES = st.builds(Reach, st.integers(1, 20), st.integers(0, 9), st.none() | st.integers(1, 25))
PHASES = st.tuples(REACHES | st.just(Reach()), REACHES | st.just(Reach()), st.integers(0, 40))


class Request:
    """The model of a table: which pages of each row must be there, by brute force."""

    def __init__(self, phases: list[tuple[Reach, Reach, int]], table: PageTable) -> None:
        self.table = table
        self.future = [
            (FutureRows(first, 0, border), FutureRows(later, border))
            for first, later, border in phases
        ]
        self.retention = Retention.of(self.future)
        self.length = 0
        self.present: list[set[int]] = [set() for _ in phases]

    def fork(self) -> "Request":
        other = Request.__new__(Request)
        other.table, other.future, other.retention = self.table.fork(), self.future, self.retention
        other.length, other.present = self.length, [set(row) for row in self.present]
        return other

    def append(self, tokens: int) -> None:
        for row in self.present:
            row |= set(range(self.length // SIZE, -(-(self.length + tokens) // SIZE)))
        self.length += tokens

    def evict(self) -> int:
        gone = 0
        filling = {self.length // SIZE}
        for row, stages in enumerate(self.future):
            kept = self.present[row] & (seen_pages(stages, self.length, SIZE) | filling)
            gone += len(self.present[row]) - len(kept)
            self.present[row] = kept
        return gone


class PoolMachine(RuleBasedStateMachine):
    """Requests, cached entries and loose pages over one small pool."""

    @initialize()
    def start(self) -> None:
        self.pool = PagePool(NUM_PAGES)
        self.cached: dict[int, np.ndarray] = {}
        policies = {
            tag: ScoredEviction(self.pool, on_evict=self.cached.__delitem__)
            for tag in (Tag.SEGMENT, Tag.PREFIX)
        }
        self.policies = policies
        self.arbiter = Arbiter(self.pool, policies, CONFIG)
        self.requests: list[Request] = []
        self.loose: list[np.ndarray] = []
        self.sealed: Counter[int] = Counter()
        self.number = 0

    def pick(self, data: st.DataObject) -> Request:
        return data.draw(st.sampled_from(self.requests))

    @rule(tag=st.sampled_from(Tag), count=st.integers(0, 25))
    def allocate(self, tag: Tag, count: int) -> None:
        free, used = self.pool.num_free, {other: self.arbiter.used(other) for other in Tag}
        cached = dict(self.cached)
        try:
            pages = self.arbiter.allocate(tag, count)
        except OutOfPages:
            kept = max(0, 12 - used[Tag.SEGMENT]) if tag is not Tag.SEGMENT else 0
            assert count > free - kept
            assert (self.pool.num_free, dict(self.cached)) == (free, cached)
            return
        if tag in self.policies:
            self.number += 1
            self.policies[tag].register(self.number, pages)
            self.cached[self.number] = pages
        else:
            self.loose.append(pages)
        for other in Tag:
            if other is not tag:
                floor = min(used[other], self.arbiter.quota(other))
                entries = 24  # whole entries go, so that more than asked for may be free
                assert self.arbiter.used(other) >= floor - entries
        if count <= free and tag is Tag.SEGMENT:
            assert self.cached.keys() >= cached.keys()

    @precondition(lambda self: self.loose)
    @rule(data=st.data(), again=st.booleans())
    def free_or_share(self, data: st.DataObject, again: bool) -> None:
        pages = self.loose.pop(data.draw(st.integers(0, len(self.loose) - 1)))
        if again:
            self.pool.share(pages)
            self.loose += [pages, pages]
        else:
            self.pool.free(pages)

    @precondition(lambda self: self.cached)
    @rule(data=st.data())
    def use_entry(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.cached)))
        pages = self.cached[key]
        self.pool.share(pages)
        self.loose.append(pages)
        policy = next(one for one in self.policies.values() if key in one._pages)
        policy.touch(key)

    @precondition(lambda self: len(self.requests) < 4)
    @rule(phases=st.lists(PHASES, min_size=ROWS, max_size=ROWS))
    def begin(self, phases: list[tuple[Reach, Reach, int]]) -> None:
        tags = [Tag.GLOBAL if phase[1].window is None else Tag.LOCAL for phase in phases]
        table = PageTable(self.pool, ROWS, page_size=SIZE, allocate=self.arbiter.by_row(tags))
        self.requests.append(Request(phases, table))

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), tokens=st.integers(0, 14))
    def append(self, data: st.DataObject, tokens: int) -> None:
        request = self.pick(data)
        before = request.table.logical().copy()
        shared = before >= 0
        shared[shared] = ~self.pool.writable(before[shared])
        try:
            change = request.table.append(tokens)
        except OutOfPages:
            assert np.array_equal(request.table.logical(), before)
            return
        partial = request.length // SIZE if request.length % SIZE and tokens else None
        copied = before[shared[:, partial], partial] if partial is not None else before[:0, 0:1]
        assert change.sources.tolist() == copied.reshape(-1).tolist()
        request.append(tokens)
        after = request.table.logical()
        columns = slice(change.first_page, change.first_page + change.pages.shape[1])
        assert np.array_equal(after[:, columns], change.pages)
        assert tokens == 0 or self.pool.writable(change.pages.reshape(-1)).all()
        assert np.array_equal(before[:, : change.first_page], after[:, : change.first_page])

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        request = self.pick(data)
        free = self.pool.num_free
        promised = request.table.evictable(request.retention, request.length)
        assert request.table.keep(request.retention, request.length) == request.evict()
        assert self.pool.num_free - free == promised

    @precondition(lambda self: 0 < len(self.requests) < 4)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        self.requests.append(self.pick(data).fork())

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def seal(self, data: st.DataObject) -> None:
        request = self.pick(data)
        tokens = data.draw(st.integers(0, request.length))
        request.table.seal(Provenance.EXACT, tokens)
        full = request.table.logical()[:, : tokens // SIZE]
        assert not self.pool.writable(full[full >= 0]).any()

    @precondition(lambda self: 0 < len(self.requests) < 4)
    @rule(data=st.data(), phases=st.lists(PHASES, min_size=ROWS, max_size=ROWS))
    def adopt(self, data: st.DataObject, phases: list[tuple[Reach, Reach, int]]) -> None:
        source = self.pick(data)
        tokens = data.draw(st.integers(0, source.length)) // SIZE * SIZE
        source.table.seal(Provenance.EXACT, tokens)
        self.begin(phases)
        request = self.requests[-1]
        used = data.draw(st.integers(0, tokens))
        request.table.adopt(source.table.span(0, used, Provenance.EXACT))
        request.length = used
        whole = set(range(-(-used // SIZE)))
        request.present = [row & whole for row in source.present]

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        request = self.pick(data)
        self.requests.remove(request)
        request.table.free()

    @invariant()
    def held_pages_are_those_of_the_model(self) -> None:
        for request in getattr(self, "requests", []):
            request.table.check()
            assert request.table.length == request.length
            present = [set(np.flatnonzero(row >= 0).tolist()) for row in request.table.logical()]
            assert present == request.present

    @invariant()
    def nothing_leaks(self) -> None:
        if not hasattr(self, "pool"):
            return
        tables = [request.table.held for request in self.requests]
        self.pool.check([*tables, *self.loose, *self.cached.values()])
        assert self.pool.num_free + sum(self.arbiter.used(tag) for tag in Tag) == NUM_PAGES


PoolMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestPoolMachine = pytest.mark.filterwarnings("ignore::DeprecationWarning")(PoolMachine.TestCase)
