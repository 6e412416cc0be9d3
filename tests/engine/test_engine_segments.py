"""What is found again, by whom, and what is built while nobody waits."""

import pytest
import torch
from tests.engine.world import World, prompt_of, segments
from tests.tiny import random_ids

from redknot.engine import catalogue
from redknot.engine.messages import (
    FromEngine,
    Refused,
    SegmentAdd,
    SegmentDelete,
    SegmentInfo,
    SegmentQuery,
    Segments,
)
from redknot.segments import MemoryStore, Prompt

A, B, C, D = segments(60, 40, 33, 100)


def hits(world: World, *parts: torch.Tensor, **options: object) -> list[str]:
    lead = int(options.pop("lead", 0))  # type: ignore[call-overload]
    return [one.hit for one in world.ask(prompt_of(*parts, lead=lead), **options).told.segments]


def mail(world: World, asked: SegmentAdd | SegmentQuery | SegmentDelete) -> list[FromEngine]:
    world.engine.background.ask(asked)
    world.run()
    told, world.engine.background.mail = world.engine.background.mail, []
    return told


def add(world: World, ids: torch.Tensor, salt: str = "") -> SegmentInfo:
    (told,) = mail(world, SegmentAdd(request_id="add", salt=salt, token_ids=ids.tolist()))
    assert isinstance(told, Segments), told
    return told.segments[0]


def listed(world: World, salt: str = "", keys: tuple[str, ...] | None = None) -> dict[str, str]:
    (told,) = mail(world, SegmentQuery(request_id="list", salt=salt, keys=keys))
    assert isinstance(told, Segments)
    return {info.key: info.state for info in told.segments}


def delete(world: World, key: str, salt: str = "") -> FromEngine:
    (told,) = mail(world, SegmentDelete(request_id="delete", salt=salt, key=key))
    return told


def test_a_document_is_reused_in_another_company_and_place() -> None:
    world = World(policy="reuse", build_idle=True)
    assert hits(world, A, B) == ["none", "none"]
    world.settle()
    assert hits(world, A, C, lead=9) == ["device", "none"]
    world.settle()
    assert hits(world, C, A, lead=50) == ["device", "device"]
    assert world.count("builds") == 3
    assert world.count("build_tokens") == len(A) + len(B) + len(C)


def test_documents_behind_the_question_are_reused_too() -> None:
    world = World(policy="question_drop", build_idle=True)
    world.ask(prompt_of(A, B, first=True))
    world.settle()
    told = world.ask(prompt_of(B, A, lead=7, first=True)).told
    assert [one.hit for one in told.segments] == ["device", "device"]
    assert 0 < told.cached_tokens < len(A) + len(B)


def test_plain_reuse_computes_what_is_in_no_segment_and_the_last_token() -> None:
    world = World(policy="reuse")
    world.build(A, B)
    prompt = prompt_of(A, B, question=12)
    told = world.ask(prompt).told
    assert told.recomputed_tokens == len(prompt) - len(A) - len(B)
    ends = Prompt.of_ids([256, *A.tolist()], [(1, 1 + len(A))])
    world.session.beginnings.forget()
    told = world.ask(ends).told
    assert told.recomputed_tokens == 1 + 1, "BOS and the last token"
    assert told.cached_tokens == len(A) - 1


@pytest.mark.parametrize("tokens", [15, 16, 17, 32])
def test_a_prompt_of_whole_pages_is_found_whole_but_for_its_last_token(tokens: int) -> None:
    world = World(policy="prefix")
    prompt = Prompt.of_ids([256, *random_ids(tokens - 1).tolist()], [])
    assert world.ask(prompt, max_tokens=1).told.cached_tokens == 0
    told = world.ask(prompt, max_tokens=1).told
    assert (told.cached_tokens, told.recomputed_tokens) == (tokens - 1, 1)
    world.assert_empty()


@pytest.mark.parametrize("policy", ["prefix", "reuse"])
def test_tenants_find_their_own_alone(policy: str) -> None:
    world = World(policy=policy, build_idle=True)
    found = []
    for salt in ("a", "b", "a"):
        told = world.ask(prompt_of(A, B), salt=salt).told
        found.append((told.cached_tokens > 1, {one.hit for one in told.segments}))
        world.settle()
    assert found[:2] == [(False, {"none"})] * 2
    assert found[2][0]
    assert "none" not in found[2][1]


def test_registered_segments_are_listed_to_their_tenant_alone() -> None:
    world = World(policy="reuse")
    info = add(world, A, "a")
    assert (info.state, info.num_tokens, info.tier) == ("ready", len(A), "device")
    assert info.num_bytes > 0
    assert listed(world, "a") == {info.key: "ready"}
    assert listed(world, "a", ("no such key",)) == {}
    assert listed(world, "b") == listed(world, "b", (info.key,)) == {}
    refusal = delete(world, info.key, "b")
    assert isinstance(refusal, Refused)
    assert refusal.status == 404
    assert hits(world, A, salt="a") == ["device"]
    assert hits(world, A, salt="b", lead=3) == ["none"]
    assert isinstance(delete(world, info.key, "a"), Segments)
    assert hits(world, A, salt="a", lead=5) == ["none"]
    assert isinstance(delete(world, info.key, "a"), Refused), "gone"


def test_a_segment_that_was_evicted_is_absent() -> None:
    size = World().session.build(A).num_bytes
    world = World(store=MemoryStore(size + size // 2))
    first = add(world, A)
    second = add(world, B)
    assert listed(world) == {first.key: "absent", second.key: "ready"}
    assert isinstance(delete(world, first.key), Segments)


def test_a_build_counts_once_whoever_asks() -> None:
    world = World(policy="reuse", build_idle=True, step_ms=0.001)
    world.ask(prompt_of(A))
    world.turn()
    assert world.engine.background.has_work
    for name in ("one", "two"):
        world.engine.background.ask(SegmentAdd(request_id=name, token_ids=A.tolist()))
    world.settle()
    told = world.engine.background.mail
    assert {one.request_id for one in told if isinstance(one, Segments)} == {"one", "two"}
    assert world.count("builds") == 1
    assert world.count("build_seconds") > 0


def test_a_segment_is_deleted_while_it_is_built_in_the_middle_of_traffic() -> None:
    world = World(step_ms=0.001, policy="reuse")
    key = add(world, B).key
    name = world.submit(prompt_of(D, lead=4), max_tokens=60)
    for _ in range(8):
        world.turn()
    world.engine.background.ask(SegmentAdd(request_id="s", token_ids=A.tolist()))
    world.turn()
    world.turn()
    (building,) = set(listed_now(world)) - {key}
    world.engine.background.ask(SegmentDelete(request_id="d", key=building))
    world.run()
    told = {one.request_id: one for one in world.engine.background.mail}
    assert isinstance(told["s"], Refused)
    assert isinstance(told["d"], Segments)
    assert world.answers[name].reasons == ["length"]
    world.engine.background.mail = []
    assert listed(world) == {key: "ready"}
    assert hits(world, A) == ["none"]
    world.assert_empty()


def listed_now(world: World) -> dict[str, str]:
    """Without waiting for what is being built."""
    told = world.engine.background.catalogue.answer("now", "", None)
    return {info.key: info.state for info in told.segments}


@pytest.mark.parametrize("ids", [[], [1] * 9000, [5, 300], [-1]])
def test_what_cannot_be_a_segment_is_refused(ids: list[int]) -> None:
    world = World()
    (told,) = mail(world, SegmentAdd(request_id="s", token_ids=ids))
    assert isinstance(told, Refused)
    assert told.status == 400
    assert listed(world) == {}


@pytest.mark.parametrize("key", ["", "zz", "00" * 32, "é"])
def test_keys_that_nobody_gave_out_are_not_found(key: str) -> None:
    refusal = delete(World(), key)
    assert isinstance(refusal, Refused)
    assert refusal.status == 404


def test_a_request_does_not_wait_for_an_idle_build() -> None:
    world = World(policy="dense", build_idle=True)
    world.ask(prompt_of(*segments(400, seed=2)))
    world.turn()
    world.turn()
    assert len(world.engine.background.builder) == 1
    before, turns = world.pool.num_used, world.turns
    name = world.submit(prompt_of(lead=8))
    world.turn()
    assert world.answers[name].first_turn == turns + 1
    assert world.pool.num_used >= before, "what is half built stays"
    world.settle()
    assert world.count("builds") == 1
    assert hits(world, segments(400, seed=2)[0], policy="reuse", lead=3) == ["device"]


def test_of_too_many_that_wait_to_be_built_the_oldest_is_forgotten() -> None:
    world = World(policy="reuse", build_idle=True, max_builds=2)
    world.ask(prompt_of(A, B, C))
    world.settle()
    assert world.count("builds_dropped") == 1
    assert hits(world, A, B, C, lead=5) == ["none", "device", "device"]


def test_segments_of_exact_requests_are_not_built() -> None:
    world = World(build_idle=True)
    world.ask(prompt_of(A), exact=True)
    assert world.engine.is_idle


def test_what_is_half_built_is_not_found() -> None:
    world = World(policy="reuse", build_idle=True)
    world.ask(prompt_of(A))
    world.turn()
    world.turn()
    assert hits(world, A, lead=3) == ["none"]


def test_a_segment_that_is_stored_is_ready_whatever_waits() -> None:
    world = World(max_waiting=1)
    key = add(world, D).key
    world.submit(prompt_of(lead=1))
    for _ in range(2):
        world.engine.background.ask(SegmentAdd(request_id="again", token_ids=D.tolist()))
        (told,) = world.engine.background.mail
        world.engine.background.mail.clear()
        assert isinstance(told, Segments), told
        assert [info.state for info in told.segments] == ["ready"]
    world.run()
    assert listed(world) == {key: "ready"}
    assert isinstance(delete(world, key), Segments)
    assert not world.session.store.has(bytes.fromhex(key))


def test_what_can_never_be_stored_is_not_built() -> None:
    world = World(policy="reuse", store=MemoryStore(1000), build_idle=True)
    (told,) = mail(world, SegmentAdd(request_id="add", token_ids=A.tolist()))
    assert isinstance(told, Refused)
    assert (told.status, told.code) == (400, "too_large")
    assert listed(world) == {}
    assert hits(world, A) == ["none"]
    world.settle()
    assert world.count("builds") == 0


@pytest.mark.parametrize("tokens", [1, 33, 100])
def test_the_size_of_a_state_is_known_before_it_is_built(tokens: int) -> None:
    world = World()
    (ids,) = segments(tokens)
    size = world.session.build(ids).num_bytes
    for capacity, fits in ((size, True), (size - 1, False)):
        other = World(store=MemoryStore(capacity))
        assert other.session.may_store(tokens) == fits
        other.session.build(ids)
        assert (other.session.stored(ids) is not None) == fits


def test_no_more_is_remembered_than_some_beyond_what_is_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each state pushes out the one before; what was asked for last is known in any case."""
    monkeypatch.setattr(catalogue, "MOST_ABSENT", 5)
    size = World().session.build(A).num_bytes
    world = World(store=MemoryStore(size))
    for number, ids in enumerate(segments(*[60] * 20)):
        key = add(world, ids, salt=f"tenant-{number % 3}").key
        assert listed(world, salt=f"tenant-{number % 3}")[key] == "ready"
        known = world.engine.background.catalogue._known
        assert sum(map(len, known.values())) <= 5 + 1 + 1


def test_a_segment_that_finds_the_queue_full_is_refused_as_a_request_is() -> None:
    """429: it may be tried again; nothing of it is remembered."""
    world = World(max_waiting=1)
    waits = world.submit(prompt_of(lead=1))
    world.engine.background.ask(SegmentAdd(request_id="add", token_ids=A.tolist()))
    (told,) = world.engine.background.mail
    assert isinstance(told, Refused), told
    assert (told.status, told.code) == (429, "queue_full")
    world.engine.background.mail.clear()
    assert listed(world) == {}
    assert world.answers[waits].reasons == ["length"]
    assert add(world, A).state == "ready"
