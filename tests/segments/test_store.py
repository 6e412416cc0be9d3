"""The store in memory against a plain ordered dictionary: order of use, bytes, eviction, damage."""

from collections import OrderedDict

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from redknot.segments import MemoryStore, SegmentState

KEYS = st.sampled_from([bytes([index]) * 32 for index in range(6)])
TOKEN_BYTES = 2 * 4 * 2  # two planes of two float32


def make_state(tokens: int, value: float) -> SegmentState:
    """State of ``tokens`` tokens: one layer, one group, dimension 2."""
    planes = {name: torch.full((1, 1, tokens, 2), value) for name in ("key", "value")}
    return SegmentState(torch.arange(tokens), planes)


class StoreMachine(RuleBasedStateMachine):
    """Any sequence of calls, beside a model that evicts by hand."""

    @initialize(capacity=st.integers(0, 12), slack=st.integers(0, TOKEN_BYTES - 1))
    def open(self, capacity: int, slack: int) -> None:
        self.capacity = capacity * TOKEN_BYTES + slack
        self.store = MemoryStore(self.capacity)
        self.model: OrderedDict[bytes, SegmentState] = OrderedDict()
        self.damaged: set[bytes] = set()
        self.counts = {"hits": 0, "misses": 0, "evictions": 0, "damaged": 0}
        self.stamp = 0.0

    def forget(self, key: bytes) -> None:
        del self.model[key]
        self.damaged.discard(key)

    def held(self) -> int:
        return sum(len(state) * TOKEN_BYTES for state in self.model.values())

    @rule(key=KEYS, tokens=st.integers(1, 6))
    def put(self, key: bytes, tokens: int) -> None:
        self.stamp += 1
        state = make_state(tokens, self.stamp)
        kept = self.store.put(key, state)
        assert kept == (tokens * TOKEN_BYTES <= self.capacity)
        if not kept or key in self.model:  # the first state under a key stays
            return
        while self.held() + tokens * TOKEN_BYTES > self.capacity:
            self.forget(next(iter(self.model)))
            self.counts["evictions"] += 1
        self.model[key] = state

    @rule(key=KEYS)
    def get(self, key: bytes) -> None:
        state = self.store.get(key)
        if key in self.damaged:
            self.forget(key)
            self.counts["damaged"] += 1
        if key not in self.model:
            self.counts["misses"] += 1
            assert state is None
            return
        self.counts["hits"] += 1
        self.model.move_to_end(key)
        assert state is self.model[key]

    @rule(key=KEYS)
    def delete(self, key: bytes) -> None:
        assert self.store.delete(key) == (key in self.model)
        if key in self.model:
            self.forget(key)

    @rule(
        key=KEYS,
        plane=st.sampled_from(["key", "value"]),
        place=st.integers(0, 11),
        bit=st.integers(0, 30),
    )
    def damage(self, key: bytes, plane: str, place: int, bit: int) -> None:
        """Flip one bit, as failing memory would; a second flip elsewhere does not mend it."""
        if key in self.model and key not in self.damaged:
            words = self.model[key].planes[plane].view(torch.int32).view(-1)
            words[place % len(words)] ^= 1 << bit
            self.damaged.add(key)

    @invariant()
    def agrees(self) -> None:
        self.store.check()
        usage = self.store.usage()
        assert self.store.keys() == list(self.model)
        assert usage.num_entries == len(self.model)
        assert usage.num_bytes == self.held() <= usage.capacity_bytes == self.capacity
        assert {name: getattr(usage, name) for name in self.counts} == self.counts


StoreMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, database=None
)
TestStore = StoreMachine.TestCase


def test_check_notices_bytes_that_do_not_add_up() -> None:
    store = MemoryStore(100 * TOKEN_BYTES)
    store.put(b"a", make_state(3, 1.0))
    store.check()
    state = store.get(b"a")
    assert state is not None
    state.planes["key"] = torch.zeros(1, 1, 9, 2)
    with pytest.raises(RuntimeError, match="bytes"):
        store.check()


def test_a_store_without_verification_hands_out_what_it_holds() -> None:
    """The checksum is what finds damage, not chance."""
    store = MemoryStore(verify=False)
    state = make_state(3, 1.0)
    store.put(b"a", state)
    state.planes["key"][0, 0, 0, 0] = 2.0
    assert store.get(b"a") is state


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_any_single_change_of_any_element_type_is_found(dtype: torch.dtype) -> None:
    for plane in ("key", "value"):
        for place in range(6):
            state = make_state(3, 1.0)
            state = SegmentState(
                state.token_ids, {name: part.to(dtype) for name, part in state.planes.items()}
            )
            store = MemoryStore()
            store.put(b"a", state)
            state.planes[plane].view(-1)[place] += torch.finfo(dtype).eps
            assert store.get(b"a") is None
            assert store.usage().num_entries == 0


def test_a_negative_capacity_is_refused() -> None:
    with pytest.raises(ValueError, match="capacity"):
        MemoryStore(-1)
