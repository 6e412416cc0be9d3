"""Beginnings share pages with prompts: found by their tokens, kept within bounds, not changed."""

from collections import OrderedDict
from os.path import commonprefix

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.execution.eager import assert_near, lively_session, rounding
from tests.tiny import random_ids

from redknot.execution import ExecutionSettings, PromptCache
from redknot.execution.beginnings import Beginnings, Scope
from redknot.execution.session import Session
from redknot.execution.turns import drained
from redknot.recovery.policies import Dense, Prefix
from redknot.segments import Prompt
from redknot.segpaged import PageStorage

LAYERS, GROUPS, PAGE = 2, 2, 4
ROWS = LAYERS * GROUPS
CAPACITY = 9
"Of the beginnings of the machine, in pages of all rows."
SCOPES = [Scope(), Scope("tenant"), Scope("", "chain"), Scope("tenant", "chain"), Scope("", "next")]

Ids = tuple[int, ...]
ids = st.lists(st.integers(0, 1), min_size=1, max_size=14).map(tuple)
cpu = torch.device("cpu")


def open_storage(num_pages: int | None = None) -> PageStorage:
    return PageStorage(
        {"key": 2, "value": 2},
        page_size=PAGE,
        dtype=torch.float32,
        device=cpu,
        num_pages=num_pages or 0,
        grows=num_pages is None,
    )


def codes(token_ids: Ids) -> list[float]:
    """State of every position: it says which tokens stand there and before."""
    return [
        float(int("1" + "".join(map(str, token_ids[: end + 1])), 2))
        for end in range(len(token_ids))
    ]


def filled(storage: PageStorage, token_ids: Ids) -> PromptCache:
    cache = PromptCache(storage, LAYERS, GROUPS)
    cache.reserve(len(token_ids))
    for layer in range(LAYERS):
        kv, positions = cache.layer(layer), torch.arange(len(token_ids))
        pages = kv.table[:, positions // PAGE].long()
        for plane in (kv.key, kv.value):
            plane[pages, positions % PAGE] = torch.tensor(codes(token_ids))[None, :, None]
    return cache


def pages_of(token_ids: Ids) -> int:
    return ROWS * -(-len(token_ids) // PAGE)


class Keeping(RuleBasedStateMachine):
    """A list of entries in the order of their last use says what must be found."""

    def __init__(self) -> None:
        super().__init__()
        self.storage = open_storage()
        self.beginnings = Beginnings(self.storage, CAPACITY * ROWS * self.storage.page_bytes)
        self.kept: OrderedDict[tuple[Scope, Ids], tuple[PromptCache, int]] = OrderedDict()

    def shared(self, key: tuple[Scope, Ids], prompt: Ids) -> int:
        """What a prompt may take over of an entry."""
        scope, known = key
        tokens = len(commonprefix([known, prompt]))
        goes_on = not scope.chain or tokens < len(prompt)
        return tokens if tokens >= self.kept[key][1] and goes_on else 0

    def put(self, scope: Scope, token_ids: Ids, least: int) -> None:
        cache = filled(self.storage, token_ids)
        self.beginnings.put(torch.tensor(token_ids), cache, scope, least)
        if least == 1:
            alike = [key for key in self.kept if key[0] == scope]
            covering = [key for key in alike if key[1][: len(token_ids)] == token_ids]
            if covering:
                self.kept.move_to_end(covering[0])
                return
            for key in alike:
                if token_ids[: len(key[1])] == key[1]:
                    del self.kept[key]
        self.kept.pop((scope, token_ids), None)
        self.kept[scope, token_ids] = cache, least
        while sum(pages_of(token_ids) for _, token_ids in self.kept) > CAPACITY * ROWS:
            self.kept.popitem(last=False)

    @rule(scope=st.sampled_from(SCOPES[:2]), token_ids=ids)
    def put_exact(self, scope: Scope, token_ids: Ids) -> None:
        self.put(scope, token_ids, 1)

    @rule(scope=st.sampled_from(SCOPES[2:]), token_ids=ids, part=st.floats(0, 1))
    def put_derived(self, scope: Scope, token_ids: Ids, part: float) -> None:
        """Of which a part at least must be shared, and more than one token."""
        self.put(scope, token_ids, max(2, round(part * len(token_ids))))

    @rule(prompt=ids, scopes=st.sets(st.sampled_from(SCOPES)))
    def find(self, prompt: Ids, scopes: set[Scope]) -> None:
        shares = {key: self.shared(key, prompt) for key in self.kept if key[0] in scopes}
        found = self.beginnings.find(torch.tensor(prompt), scopes)
        if found is None:
            assert not any(shares.values())
            return
        assert found.tokens == max(shares.values()) > 0
        (used,) = [key for key, (cache, _) in self.kept.items() if cache is found.cache]
        assert used[0] == found.scope in scopes
        assert shares[used] == found.tokens
        for plane in found.cache.first(found.tokens):
            state = torch.tensor(codes(prompt[: found.tokens]))
            assert torch.equal(plane, state[None, None, :, None].expand_as(plane))
        self.kept.move_to_end(used)

    @precondition(lambda self: self.kept)
    @rule(data=st.data(), tail=ids)
    def find_alike(self, data: st.DataObject, tail: Ids) -> None:
        """A prompt that ends within what is kept, just there, or goes on."""
        scope, known = data.draw(st.sampled_from(list(self.kept)))
        prompt = known[: data.draw(st.integers(1, len(known)))] + tail[1:]
        self.find(prompt, {scope})

    @rule(pages=st.integers(0, 60))
    def reclaim(self, pages: int) -> None:
        """Least recently used first, no more than it takes, and none where all are too few."""
        freed, enough = 0, sum(pages_of(ids) for _, ids in self.kept) >= pages
        while enough and freed < pages:
            (_, token_ids), _ = self.kept.popitem(last=False)
            freed += pages_of(token_ids)
        assert self.storage.reclaim(pages) == freed

    @rule()
    def forget(self) -> None:
        self.beginnings.forget()
        self.kept.clear()

    @invariant()
    def counts_agree(self) -> None:
        """What is not kept holds no page."""
        held = sum(pages_of(token_ids) for _, token_ids in self.kept)
        assert self.beginnings.num_bytes == held * self.storage.page_bytes
        assert held == self.storage.pool.num_used == self.beginnings.reclaimable()
        assert held <= CAPACITY * ROWS
        self.storage.pool.check([cache.held for cache, _ in self.kept.values()])


TestKeeping = Keeping.TestCase
TestKeeping.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


@pytest.mark.parametrize(
    ("shared", "more", "taken"),
    [(5, 4, 0), (6, 4, 6), (8, 1, 8), (10, 1, 10), (6, 0, 0), (8, 0, 0), (10, 0, 0)],
)
def test_what_a_policy_made_is_found_by_prompts_that_share_enough_and_go_on(
    shared: int, more: int, taken: int
) -> None:
    """Of ten tokens, six of which must be shared."""
    storage, scope, known = open_storage(), Scope("tenant", "chain"), (1,) * 10
    beginnings = Beginnings(storage)
    beginnings.put(torch.tensor(known), filled(storage, known), scope, least=6)
    prompt = torch.tensor(known[:shared] + (0,) * more)
    found = beginnings.find(prompt, {scope})
    assert (0 if found is None else found.tokens) == taken
    others = {Scope(), Scope("tenant"), Scope("tenant", "next"), Scope("", "chain")}
    assert beginnings.find(prompt, others) is None


def test_one_that_is_larger_than_all_may_be_is_not_kept() -> None:
    storage = open_storage()
    small = filled(storage, (1,) * PAGE)
    beginnings = Beginnings(storage, small.num_bytes)
    beginnings.put(torch.ones(PAGE), small)
    beginnings.put(torch.zeros(PAGE + 1), filled(storage, (0,) * (PAGE + 1)))
    assert beginnings.find(torch.zeros(PAGE + 1)) is None
    assert beginnings.find(torch.ones(PAGE)) is not None
    assert storage.pool.num_used == ROWS


def test_no_more_are_kept_than_can_be_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("redknot.execution.beginnings.MOST", 3)
    storage = open_storage()
    beginnings = Beginnings(storage)
    for token in range(5):
        beginnings.put(torch.tensor([token]), filled(storage, (1,)))
    found = [beginnings.find(torch.tensor([token])) is not None for token in range(5)]
    assert found == [False, False, True, True, True]
    assert storage.pool.num_used == 3 * ROWS


def test_storage_keeps_no_beginnings_alive() -> None:
    storage = open_storage()
    beginnings = Beginnings(storage)
    beginnings.put(torch.ones(5), filled(storage, (1,) * 5))
    assert storage.pool.num_used == 2 * ROWS
    del beginnings
    assert storage.pool.num_used == 0
    assert storage.reclaim(1) == 0


def test_pages_that_a_prompt_shares_are_not_freed_and_not_called_reclaimable() -> None:
    storage = open_storage()
    beginnings, token_ids = Beginnings(storage), (1,) * (2 * PAGE + 1)
    beginnings.put(torch.tensor(token_ids), filled(storage, token_ids))
    found = beginnings.find(torch.tensor(token_ids))
    assert found is not None
    prompt = found.cache.fork()
    prompt.truncate(PAGE)
    assert beginnings.reclaimable() == 2 * ROWS
    assert beginnings.reclaim(3 * ROWS) == 0
    assert beginnings.reclaimable() == 2 * ROWS
    assert beginnings.reclaim(2 * ROWS) == 2 * ROWS
    assert storage.pool.num_used == ROWS
    assert prompt.first(PAGE)[0][0, 0, :, 0].tolist() == codes(token_ids[:PAGE])
    prompt.release()
    storage.pool.check([])


def plain(*parts: tuple[int, int]) -> Prompt:
    """BOS and random tokens: how many of which seed."""
    return Prompt.of_ids(
        [256, *(t for count, seed in parts for t in random_ids(count, seed).tolist())], []
    )


KNOWN = plain((59, 0))
LONGER = plain((59, 0), (20, 1))


def test_tenants_do_not_find_each_others() -> None:
    session = lively_session()
    session.remember(
        session.executor.prefill(KNOWN.token_ids, session.look_up(KNOWN), Dense()), 60, "one"
    )
    assert session.look_up(LONGER, salt="one").layout.exact == 60
    for other in (None, "", "two"):
        known = session.look_up(LONGER, salt=other, chain="one")
        assert known.beginning is None
        assert known.layout.exact == 0


def overwrite(session: Session) -> None:
    """Whatever is free now has had another state since."""
    session.prefill(plain((300, 9)), Dense())


@pytest.mark.parametrize("turns", range(6))
def test_a_prompt_stays_right_when_what_it_took_over_is_dropped_meanwhile(turns: int) -> None:
    """Before its first turn the tokens are computed instead; later it has the pages itself."""
    session = lively_session()
    cold = session.executor.prefill(LONGER.token_ids, session.look_up(LONGER), Prefix())
    session.prefill(KNOWN, Prefix())
    known = session.look_up(LONGER)
    assert known.beginning is not None
    beginning = known.beginning.cache
    warm = session.executor.prefill(LONGER.token_ids, known, Prefix(), beginning=beginning)
    assert_near(warm.logits, cold.logits, rounding(session.model.hf, len(LONGER)))
    running = session.executor.prefilling(LONGER.token_ids, known, Prefix(), beginning=beginning)
    for _ in range(min(turns, 4)):
        next(running)
    found = drained(running) if turns == 5 else None
    session.beginnings.forget()
    overwrite(session)
    found = found or drained(running)
    wanted = warm if turns else cold
    assert found.layout.exact == (60 if turns else 0)
    assert torch.equal(found.logits, wanted.logits)
    for got, truth in zip(found.cache.first(80), wanted.cache.first(80), strict=True):
        assert torch.equal(got, truth)


@pytest.mark.parametrize("shared", [1, 15, 16, 17, 31, 48, 59, 60])
def test_a_prompt_never_writes_into_what_it_took_over(shared: int) -> None:
    session = lively_session()
    session.prefill(KNOWN, Prefix())
    found = session.beginnings.find(KNOWN.token_ids)
    assert found is not None
    table, planes = found.cache.table.clone(), session.executor.storage.planes
    pages = table[table >= 0].long()
    before = {name: plane[pages].view(torch.int32) for name, plane in planes.items()}
    ids = [*KNOWN.token_ids[:shared].tolist(), *((random_ids(30, 7) + 128) % 256).tolist()]
    ids[shared] = (int(KNOWN.token_ids[shared]) + 1) % 256 if shared < len(KNOWN) else 0
    prompt = Prompt.of_ids(ids, [])
    known = session.look_up(prompt)
    prefilled = session.executor.prefill(prompt.token_ids, known, Prefix(), beginning=found.cache)
    assert prefilled.layout.exact == shared
    session.executor.extend(prefilled, random_ids(20, 8))
    assert torch.equal(found.cache.table, table)
    for name, plane in session.executor.storage.planes.items():
        assert torch.equal(plane[pages].view(torch.int32), before[name])


def test_a_fixed_pool_that_is_full_of_beginnings_serves_new_prompts() -> None:
    """Room for two prompts of five pages in each of 8 rows; ten come."""
    session = lively_session(settings=ExecutionSettings(num_pages=8 * 10))
    alone, pool = lively_session(), session.executor.storage.pool
    full = 0
    for seed in range(10):
        prompt = plain((70, seed))
        full += pool.num_free < 8 * 5
        logits = session.prefill(prompt, Prefix()).logits
        assert torch.equal(logits, alone.prefill(prompt, Prefix()).logits)
        assert session.look_up(prompt).layout.exact == 70
    assert full == 8
    assert pool.num_pages == 80
    session.beginnings.forget()
    pool.check([])
    assert pool.num_used == 0


def test_pages_that_several_share_are_counted_once() -> None:
    """Chats over one long system prompt keep their turns for as long as their own pages fit."""
    storage = open_storage()
    system = filled(storage, (1,) * (8 * PAGE))
    beginnings = Beginnings(storage, (8 + 5) * ROWS * storage.page_bytes)
    for chat in range(7):
        cache = system.fork()
        cache.reserve(9 * PAGE)
        ids = torch.tensor((1,) * (8 * PAGE) + (chat,) * PAGE)
        beginnings.put(ids, cache, Scope("tenant", f"chat {chat}"), least=9 * PAGE)
    system.release()
    assert len(beginnings._entries) == 5
    assert beginnings.num_bytes == (8 + 5) * ROWS * storage.page_bytes
    assert beginnings.reclaimable() == storage.pool.num_used == (8 + 5) * ROWS
