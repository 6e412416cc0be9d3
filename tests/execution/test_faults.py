"""Never quietly wrong: missing, damaged, foreign or cut state is a miss."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from tests.execution.eager import lively_session, spanned

from redknot.execution.session import Session
from redknot.recovery.policies import QuestionDrop, Reuse
from redknot.segments import MemoryStore, SegmentState

PROMPT = spanned(40, 33)
POLICY = Reuse()


def cold() -> torch.Tensor:
    """Logits on an empty store."""
    return lively_session().prefill(PROMPT, POLICY).logits


def warm_store() -> MemoryStore:
    """State of both segments, undamaged."""
    session = lively_session()
    assert session.build_missing(PROMPT) == 2
    return session.store  # type: ignore[return-value]


def entries(store: MemoryStore) -> list[tuple[bytes, SegmentState]]:
    """All that the store hands out."""
    found = [(key, store.get(key)) for key in store.keys()]  # noqa: SIM118 - a store is no dict
    return [(key, state) for key, state in found if state is not None]


class Faulty:
    """A store whose answers go through ``fault``."""

    def __init__(self, fault: Callable[[SegmentState], SegmentState | None]) -> None:
        self._inner, self._fault = warm_store(), fault

    def get(self, key: bytes) -> SegmentState | None:
        state = self._inner.get(key)
        return None if state is None else self._fault(state)

    def put(self, key: bytes, state: SegmentState) -> bool:
        return self._inner.put(key, state)

    def delete(self, key: bytes) -> bool:
        return self._inner.delete(key)

    def keys(self) -> list[bytes]:
        return self._inner.keys()


def on_planes(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., SegmentState]:
    """A fault that changes every plane."""
    return lambda state: replace(
        state, planes={name: change(plane) for name, plane in state.planes.items()}
    )


def other_ids(state: SegmentState) -> SegmentState:
    ids = state.token_ids.clone()
    ids[-1] = (ids[-1] + 1) % 256
    return replace(state, token_ids=ids)


def only_key(state: SegmentState) -> SegmentState:
    return replace(state, planes={"key": state.planes["key"]})


def cut_value(state: SegmentState) -> SegmentState:
    return replace(state, planes=state.planes | {"value": state.planes["value"][:, :, :-1]})


def shorter(state: SegmentState) -> SegmentState:
    planes = {name: plane[:, :, :-1] for name, plane in state.planes.items()}
    return replace(state, token_ids=state.token_ids[:-1], planes=planes)


FAULTS: dict[str, tuple[Callable[[SegmentState], SegmentState | None], str]] = {
    "nothing": (lambda state: None, "not stored"),
    "tokens cut": (on_planes(lambda plane: plane[:, :, :-1]), "not whole"),
    "layers cut": (on_planes(lambda plane: plane[:-1]), "not whole"),
    "groups cut": (on_planes(lambda plane: plane[:, :1]), "not whole"),
    "dims cut": (on_planes(lambda plane: plane[..., :8]), "not whole"),
    "one plane cut": (cut_value, "not whole"),
    "no values": (only_key, "not whole"),
    "half precision": (on_planes(lambda plane: plane.half()), "not whole"),
    "brain float": (on_planes(lambda plane: plane.bfloat16()), "not whole"),
    "double": (on_planes(lambda plane: plane.double()), "not whole"),
    "other tokens": (other_ids, "tokens are others"),
    "fewer tokens": (shorter, "tokens are others"),
}


def assert_missed(session: Session, reason: str) -> None:
    """Both segments miss with ``reason``; the logits are those of an empty store, bit for bit."""
    outcomes = session.look_up(PROMPT).outcomes
    assert [outcome.status for outcome in outcomes] == ["new", "new"]
    assert all(reason in outcome.reason for outcome in outcomes), outcomes
    assert torch.equal(session.prefill(PROMPT, POLICY).logits, cold())


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_answer_of_the_store_is_a_miss_with_a_reason(fault: str) -> None:
    change, reason = FAULTS[fault]
    assert_missed(lively_session(store=Faulty(change)), reason)


def test_undamaged_state_is_used_and_changes_the_logits() -> None:
    """Else the tests of this module could not fail."""
    session = lively_session(store=Faulty(lambda state: state))
    assert [outcome.status for outcome in session.look_up(PROMPT).outcomes] == ["stored", "stored"]
    assert not torch.equal(session.prefill(PROMPT, POLICY).logits, cold())


@pytest.mark.parametrize("plane", ["key", "value"])
@pytest.mark.parametrize("bit", [0, 1, 15, 16, 22, 23, 30, 31])
def test_a_flipped_bit_in_memory_is_a_miss(plane: str, bit: int) -> None:
    store = warm_store()
    for index, (_, state) in enumerate(entries(store)):
        with torch.inference_mode():
            words = state.planes[plane].view(torch.int32).view(-1)
            place = (index * 7919 + bit * 104729) % len(words)
            words[place] ^= torch.tensor(1 << bit if bit < 31 else -(1 << 31), dtype=torch.int32)
    assert_missed(lively_session(store=store), "not stored")
    assert store.usage().damaged == 2
    store.check()


def test_flipped_token_ids_in_memory_are_a_miss() -> None:
    store = warm_store()
    for _, state in entries(store):
        with torch.inference_mode():
            state.token_ids[3] ^= 1
    session = lively_session(store=store)
    assert [outcome.status for outcome in session.look_up(PROMPT).outcomes] == ["new", "new"]
    assert torch.equal(session.prefill(PROMPT, POLICY).logits, cold())


def test_state_evicted_after_it_was_found_is_still_whole_for_that_request() -> None:
    store = warm_store()
    session = lively_session(store=store)
    session.prefill(PROMPT, POLICY)  # keeps the beginning: both requests below know the same
    lookup = session.look_up(PROMPT)
    expected = session.prefill(PROMPT, POLICY, lookup=lookup).logits
    for key, _ in entries(store):
        store.delete(key)
    store.check()
    assert torch.equal(session.prefill(PROMPT, POLICY, lookup=lookup).logits, expected)
    assert [outcome.status for outcome in session.look_up(PROMPT).outcomes] == ["new", "new"]


def test_state_evicted_between_two_requests_is_a_miss_in_the_second() -> None:
    store = warm_store()
    lively_session(store=store).prefill(PROMPT, POLICY)
    for key, _ in entries(store):
        store.delete(key)
    assert_missed(lively_session(store=store), "not stored")


def test_a_store_too_small_for_both_segments_misses_the_older_one() -> None:
    size = max(state.num_bytes for _, state in entries(warm_store()))
    session = lively_session(store=MemoryStore(size))
    session.build_missing(PROMPT)
    outcomes = session.look_up(PROMPT).outcomes
    assert [outcome.status for outcome in outcomes] == ["new", "stored"]
    assert outcomes[0].reason == "not stored"


def test_a_store_that_holds_nothing_answers_as_an_empty_one() -> None:
    session = lively_session(store=MemoryStore(0))
    session.build_missing(PROMPT)
    assert_missed(session, "not stored")


@pytest.mark.parametrize("fault", ["tokens cut", "half precision", "other tokens"])
def test_state_that_was_refused_is_replaced_when_it_is_built_again(fault: str) -> None:
    """Else one bad write would be a miss for ever."""
    store = MemoryStore()
    for key, state in entries(warm_store()):
        bad = FAULTS[fault][0](state)
        assert bad is not None
        store.put(key, bad)
    session = lively_session(store=store)
    assert_missed(session, FAULTS[fault][1])
    assert session.build_missing(PROMPT) == 2
    assert [outcome.status for outcome in session.look_up(PROMPT).outcomes] == ["stored", "stored"]


def test_damaged_state_of_one_segment_leaves_the_other_in_use() -> None:
    store = warm_store()
    first = lively_session().namespace.key("segment", PROMPT.token_ids[8:48])
    store.delete(first)
    session = lively_session(store=store)
    statuses = [outcome.status for outcome in session.look_up(PROMPT).outcomes]
    assert statuses == ["new", "stored"]
    plan = session.prefill(PROMPT, QuestionDrop(first=0.0, then=0.0, windows="none")).plan
    for layer in plan.layers:
        assert layer.active.tolist() == [*range(8), *range(8, 48), *range(81, len(PROMPT))]
