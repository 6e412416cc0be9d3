"""Decode: one row of each request against float64, however its keys are split."""

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tests.kernels.inputs import (
    DEVICE,
    DIMS,
    DTYPES,
    HEADS,
    PAGE_SIZES,
    Request,
    columns,
    poisoned,
    shown,
)
from tests.kernels.test_append import compilations
from tests.kernels.test_attend import Case
from torch import Tensor

from redknot.kernels.attend import DecodePlan, Reach, attend_decode, decode
from redknot.kernels.attend import decode_triton as kernel
from redknot.kernels.paging import ABSENT, PagedKV

REACHES = [
    Reach(), Reach(16, 4), Reach(1), Reach(40, 64), Reach(horizon=30), Reach(24, 8, 50),
    Reach(4, 40, 60), Reach(0), Reach(0, 3), Reach(2**30), Reach(9, 0, 5), Reach(0, 3, 10),
]  # fmt: skip


def step(
    lengths: list[int], reaches: list[Reach], heads: tuple[int, int], dim: int = 32,
    **options: object,
) -> Case:  # fmt: skip
    """One row at the end of each request."""
    requests = [Request([length - 1], length, reaches) for length in lengths]
    return Case.of(requests, heads, dim, **options)


def plan_for(
    case: Case, planned: list[int], *, target_units: int = 30, device: torch.device = DEVICE
) -> DecodePlan:
    reaches = [tuple(request.reaches) for request in case.requests]
    return DecodePlan.of(planned, reaches, device, target_units=target_units)


def attended(case: Case, plan: DecodePlan, *, impl: str = "triton") -> Tensor:
    """A step; positions of idle slots are far out."""
    live = plan.live()
    positions = torch.tensor(
        [r.positions[0] if i in live else 10**6 for i, r in enumerate(case.requests)],
        dtype=torch.int32,
    )
    query = case.query.transpose(0, 1)
    with poisoned():
        return attend_decode(
            query, case.pages.kv, plan, positions.to(DEVICE), scale=case.scale, impl=impl
        )


def run(case: Case, planned: list[int], *, impl: str = "triton", target_units: int = 30) -> Tensor:
    return attended(case, plan_for(case, planned, target_units=target_units), impl=impl)


def check(case: Case, plan: DecodePlan, out: Tensor) -> None:
    """Live rows against float64; those of idle slots are zero."""
    truth = case.truth
    for request in set(range(len(case.requests))) - set(plan.live()):
        truth.out[request] = truth.out_bound[request] = 0
    truth.check(out)


@pytest.fixture(params=[256, 16])
def shortest_unit(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(decode, "MIN_UNIT_TOKENS", request.param)
    return request.param


@pytest.mark.parametrize(
    ("heads", "dim", "dtype", "page_size", "start"),
    columns(12, 3, HEADS, DIMS, DTYPES, PAGE_SIZES, range(len(REACHES))),
)
def test_steps_agree_with_float64(
    shortest_unit: int, heads: tuple[int, int], dim: int, dtype: torch.dtype, page_size: int,
    start: int,
) -> None:  # fmt: skip
    lengths = [1, 137, 64, 5, 129]
    reaches = [REACHES[(start + head) % len(REACHES)] for head in range(heads[1])]
    case = step(lengths, reaches, heads, dim, dtype=dtype, page_size=page_size, seed=start)
    case.truth.check(run(case, lengths))


@pytest.mark.parametrize("start", range(0, len(REACHES), 3))
@pytest.mark.parametrize("ahead", [0, 60, 120])
def test_a_plan_stays_valid_while_requests_grow(start: int, ahead: int, shortest_unit: int) -> None:
    reaches = [REACHES[start + head] for head in range(3)]
    lengths = [130, 121, 150]
    case = step(lengths, reaches, (9, 3), page_size=16)
    case.truth.check(run(case, [length - ahead for length in lengths]))


@pytest.mark.parametrize("dim", [32, 64])
@pytest.mark.parametrize("target_units", [1, 7, 100])
def test_the_number_of_splits_changes_nothing_but_rounding(
    target_units: int, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "MIN_UNIT_TOKENS", 1)
    lengths = [137, 3, 90]
    case = step(lengths, [Reach(), Reach(30, 4)], (4, 2), dim)
    case.truth.check(run(case, lengths, target_units=target_units))


@pytest.mark.parametrize("impl", ["auto", "torch", "reference", "triton"])
def test_every_backend_agrees(impl: str) -> None:
    lengths = [40, 1, 33]
    case = step(lengths, [Reach(), Reach(8, 4), Reach(horizon=9)], (9, 3), impl="torch")
    case.truth.check(run(case, lengths, impl=impl))


@pytest.mark.parametrize("keys", [16, 32, 128])
def test_keys_of_a_step_change_nothing_but_rounding(keys: int) -> None:
    lengths = [70, 33]
    case = step(lengths, [Reach(), Reach(20, 5)], (4, 2))
    plan = DecodePlan.of(lengths, (Reach(), Reach(20, 5)), DEVICE)
    positions = torch.tensor(lengths, dtype=torch.int32).to(DEVICE) - 1
    out = kernel.attend_decode(
        case.query.transpose(0, 1), case.pages.kv, plan, positions, scale=case.scale,
        config=kernel.Config(keys),
    )  # fmt: skip
    case.truth.check(out)


@pytest.mark.parametrize(("length", "splits"), [(33, 2), (49, 3), (320, 20), (321, 20)])
def test_splits_take_every_key_and_may_be_many(
    length: int, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "MIN_UNIT_TOKENS", 1)
    case = step([length], [Reach()], (16, 1))
    plan = DecodePlan.of([length], (Reach(),), DEVICE, target_units=splits)
    positions = torch.tensor([length - 1], dtype=torch.int32).to(DEVICE)
    with poisoned():
        out = kernel.attend_decode(
            case.query.transpose(0, 1),
            case.pages.kv,
            plan,
            positions,
            scale=case.scale,
            config=kernel.Config(16),
        )
    case.truth.check(out)


LENGTHS = st.lists(st.integers(0, 12) | st.integers(0, 2000), min_size=1, max_size=6)
TARGETS = st.integers(1, 9) | st.just(264)
QUICK = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))


@st.composite
def plans(draw: st.DrawFn) -> tuple[list[int], list[tuple[Reach, ...]], int]:
    """Lengths, the reaches of each request, and a target."""
    lengths, heads = draw(LENGTHS), draw(st.integers(1, 4))
    one = st.tuples(*[st.sampled_from(REACHES)] * heads)
    return lengths, draw(st.lists(one, min_size=len(lengths), max_size=len(lengths))), draw(TARGETS)


@given(plans(), st.sampled_from([1, 8, 256]))
@QUICK
def test_units_cover_every_stream_once_and_are_about_equal(
    drawn: tuple[list[int], list[tuple[Reach, ...]], int], shortest: int
) -> None:
    lengths, reaches, target = drawn
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "MIN_UNIT_TOKENS", shortest)
        plan = DecodePlan.of(lengths, reaches, DEVICE, target_units=target)
    seen = [
        _seen(length, reach) for length, own in zip(lengths, reaches, strict=True) for reach in own
    ]
    entries, heads = plan.units.tolist(), len(reaches[0])
    used = [unit for unit in entries if unit[0] >= 0]
    assert entries == used + [[-1] * 4] * (len(entries) - len(used))
    work = [unit for unit in used if unit[2] > 0]
    idle = [unit[0] for unit in used if unit[2] == 0]
    live = [stream for stream in range(len(seen)) if lengths[stream // heads]]
    assert sorted(live + idle) == list(range(len(seen)))
    assert plan.live() == [request for request, length in enumerate(lengths) if length]
    joined = [entry for entry in plan.split_streams.tolist() if entry[0] >= 0]
    assert plan.split_streams[len(joined) :].eq(-1).all()
    assert {stream for stream, _, _ in joined} == {unit[0] for unit in work if unit[2] > 1}
    first = {stream: (splits, slot) for stream, splits, slot in joined}
    for stream in live:
        own = sorted(unit for unit in work if unit[0] == stream)
        splits, slot = first.get(stream, (1, None))
        assert [(unit[1], unit[2]) for unit in own] == [(split, splits) for split in range(splits)]
        if slot is not None:
            assert [unit[3] for unit in own] == [slot + split for split in range(splits)]
    slots = sorted(unit[3] for unit in work if unit[2] > 1)
    assert slots == list(range(len(slots)))
    assert len(slots) <= plan.num_slots
    largest = max(shortest, -(-sum(seen) // target))
    assert all(seen[stream] <= splits * largest for stream, _, splits, _ in work)
    shares = [seen[stream] / splits for stream, _, splits, _ in work]
    assert shares == sorted(shares, reverse=True)


@given(plans(), st.data(), st.sampled_from([1, 8, 256]))
@QUICK
def test_the_room_of_a_plan_does_not_depend_on_lengths(
    drawn: tuple[list[int], list[tuple[Reach, ...]], int], data: st.DataObject, shortest: int
) -> None:
    lengths, reaches, target = drawn
    count = len(lengths)
    others = data.draw(st.lists(st.integers(0, 9) | st.integers(0, 2000), min_size=count,
                                max_size=count))  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "MIN_UNIT_TOKENS", shortest)
        one, other = (
            DecodePlan.of(tokens, reaches, DEVICE, target_units=target)
            for tokens in (lengths, others)
        )
    assert one.units.shape == other.units.shape == (target + count * len(reaches[0]) - 1, 4)
    assert one.split_streams.shape == other.split_streams.shape
    assert one.num_slots == other.num_slots <= 2 * target
    assert len(one.split_streams) < target
    one.refill(other)
    assert torch.equal(one.units, other.units)
    assert torch.equal(one.split_streams, other.split_streams)


@pytest.mark.parametrize(
    ("lengths", "target", "units", "split", "slots"),
    [
        ([1, 3], 2, 3, 1, 2),
        ([1, 1, 100], 2, 4, 1, 2),
        ([3, 3], 3, 4, 2, 4),
        ([9, 9, 1], 3, 5, 2, 4),
    ],
)
def test_plans_may_need_all_their_room(
    lengths: list[int], target: int, units: int, split: int, slots: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(decode, "MIN_UNIT_TOKENS", 1)
    plan = DecodePlan.of(lengths, (Reach(),), DEVICE, target_units=target)
    assert (len(plan.units), len(plan.split_streams), plan.num_slots) == (units, split, slots)
    assert (plan.units >= 0).all()
    assert (plan.split_streams >= 0).all()
    assert (plan.units[:, 2] > 1).sum() == slots


@pytest.mark.parametrize(
    ("reach", "splits"),
    [
        (Reach(12, 4), 1), (Reach(13, 4), 2), (Reach(4, 40, 16), 1), (Reach(4, 40, 17), 2),
        (Reach(horizon=16), 1), (Reach(horizon=17), 2), (Reach(0, 16), 1), (Reach(0, 17), 2),
    ],
)  # fmt: skip
def test_nothing_is_joined_where_no_stream_can_be_split(
    reach: Reach, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a length where the reach shows as much as it ever can."""
    monkeypatch.setattr(decode, "MIN_UNIT_TOKENS", 16)
    if splits == 1:
        monkeypatch.setattr(kernel, "_join", None)
    length = {None: 99}.get(reach.horizon, reach.horizon)
    case = step([length], [reach], (4, 1))
    plan = plan_for(case, [length])
    assert (plan.num_slots > 0) == (splits > 1)
    assert (plan.units[:, 2] > 0).sum() == splits
    case.truth.check(attended(case, plan))


def _seen(length: int, reach: Reach) -> int:
    """Keys that the row at ``length - 1`` sees, counted by hand."""
    return len(shown(length - 1, reach))


@given(st.data(), st.sampled_from([1, 16]), st.integers(1, 40))
@settings(max_examples=25, deadline=None, phases=(Phase.explicit, Phase.generate))
def test_every_visible_key_is_counted_once(data: st.DataObject, shortest: int, target: int) -> None:
    """Of equal scores each key counts alike, and values that tell keys apart show how often."""
    lengths = data.draw(st.lists(st.integers(0, 120), min_size=1, max_size=3))
    planned = [data.draw(st.integers(1, 120)) if length else 0 for length in lengths]
    reaches = [(data.draw(st.sampled_from(REACHES)),) for _ in lengths]
    page = torch.zeros(len(lengths), 128, 128, device=DEVICE)
    value = torch.eye(128, device=DEVICE).expand(len(lengths), -1, -1).contiguous()
    table = torch.arange(len(lengths), dtype=torch.int32, device=DEVICE)[:, None]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "MIN_UNIT_TOKENS", shortest)
        plan = DecodePlan.of(planned, reaches, DEVICE, target_units=target)
    positions = torch.tensor(lengths, dtype=torch.int32, device=DEVICE) - 1
    with poisoned():
        out = kernel.attend_decode(
            page[:, :1], PagedKV(page, value, table, 1), plan, positions, scale=1.0,
            config=kernel.Config(16),
        )  # fmt: skip
    expected = torch.zeros(len(lengths), 128)
    for row, (length, (reach,)) in enumerate(zip(lengths, reaches, strict=True)):
        keys = sorted(shown(length - 1, reach))
        expected[row, keys] = 1 / max(1, len(keys))
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-5, atol=0)


MIXED = [
    [Reach(), Reach(16, 4)], [Reach(), Reach()], [Reach(9, 0, 5), Reach(24, 8, 50)],
    [Reach(4, 40, 60), Reach()], [Reach(16, 4), Reach(16, 4)],
]  # fmt: skip


def mixed(lengths: list[int], **options: object) -> Case:
    """Requests with reaches of their own."""
    requests = [
        Request([length - 1], length, reaches)
        for length, reaches in zip(lengths, MIXED, strict=True)
    ]
    return Case.of(requests, (6, 2), 32, **options)


@pytest.mark.parametrize("impl", ["auto", "torch", "reference", "triton"])
@pytest.mark.parametrize("ahead", [0, 29])
def test_every_request_may_have_reaches_of_its_own(
    impl: str, ahead: int, shortest_unit: int
) -> None:
    lengths = [137, 90, 64, 100, 30]
    case = mixed(lengths, impl="torch")
    case.truth.check(run(case, [length - ahead for length in lengths], impl=impl))


@pytest.mark.parametrize("impl", ["auto", "torch", "reference", "triton"])
@pytest.mark.parametrize("idle", [(1,), (0, 3), (2, 4), (0, 1, 2, 3, 4)])
def test_rows_of_idle_slots_are_zero(idle: tuple[int, ...], impl: str, shortest_unit: int) -> None:
    case = mixed([137, 90, 64, 100, 30], impl="torch")
    for request in idle:
        case.pages.kv.table[2 * request : 2 * request + 2] = ABSENT
    plan = plan_for(case, [0 if i in idle else 120 for i in range(5)])
    assert plan.live() == [request for request in range(5) if request not in idle]
    check(case, plan, attended(case, plan, impl=impl))


@pytest.mark.parametrize("device", [DEVICE, torch.device("cpu")])
def test_a_plan_that_is_refilled_runs_like_a_fresh_one(
    device: torch.device, shortest_unit: int
) -> None:
    case = mixed([137, 90, 64, 100, 30])
    kept = plan_for(case, [5, 0, 300, 1, 0])
    where = [x.data_ptr() for x in (kept.units, kept.split_streams, kept.reaches)]
    for lengths in ([137, 90, 64, 100, 30], [0, 90, 64, 0, 30], [0] * 5, [1, 90, 64, 70, 0]):
        fresh = plan_for(case, lengths)
        kept.refill(plan_for(case, lengths, device=device))
        out = attended(case, kept)
        assert torch.equal(out, attended(case, fresh))
        check(case, kept, out)
    assert [x.data_ptr() for x in (kept.units, kept.split_streams, kept.reaches)] == where


def test_a_refilled_plan_forgets_who_was_idle_at_the_same_positions(shortest_unit: int) -> None:
    case = mixed([137, 90, 64, 100, 30], impl="torch")
    kept = plan_for(case, [137, 0, 64, 0, 30])
    positions = torch.tensor([r.positions[0] for r in case.requests], dtype=torch.int32).to(DEVICE)

    def out() -> Tensor:
        rows = case.query.transpose(0, 1)
        return attend_decode(rows, case.pages.kv, kept, positions, scale=case.scale, impl="torch")

    check(case, kept, out())
    for lengths in ([0, 90, 64, 0, 30], [137, 90, 64, 100, 30], [0, 0, 0, 100, 0]):
        kept.refill(plan_for(case, lengths))
        check(case, kept, out())


def test_a_plan_refuses_another_room_or_pattern() -> None:
    plan = DecodePlan.of([40, 50], (Reach(), Reach(8)), DEVICE)
    before = plan.units.clone()
    for message, other in (
        ("reaches differ", DecodePlan.of([40, 50], (Reach(), Reach(9)), DEVICE)),
        ("reaches differ", DecodePlan.of([40, 50, 60], (Reach(), Reach(8)), DEVICE)),
        ("room", DecodePlan.of([40, 50], (Reach(), Reach(8)), DEVICE, target_units=263)),
    ):
        with pytest.raises(ValueError, match=message):
            plan.refill(other)
    assert torch.equal(plan.units, before)


@pytest.mark.parametrize("heads", [0, 2])
def test_no_requests(heads: int) -> None:
    plan = DecodePlan.of([], (Reach(),) * heads, DEVICE, target_units=3)
    assert plan.live() == []
    assert plan.num_slots == 0


def test_plans_that_make_no_sense_are_refused() -> None:
    one = (Reach(), Reach())
    for message, lengths, reaches, target in (
        ("units for requests", [4, -1], one, 264),
        ("0 units", [4, 5], one, 0),
        ("for 2 requests", [4, 5], [one], 264),
        ("for 2 requests", [4, 5], [one, one, one], 264),
        ("2, 1", [4, 5], [one, one[:1]], 264),
    ):
        with pytest.raises(ValueError, match=message):
            DecodePlan.of(lengths, reaches, DEVICE, target_units=target)


@pytest.mark.skipif(DEVICE.type != "cuda", reason="nothing is compiled on a CPU")
def test_one_compilation_serves_any_number_of_requests_units_and_pages() -> None:
    for turn, lengths in enumerate(([137, 90, 64], [1], [16] * 16, [1000, 0, 5, 3, 2])):
        case = step([max(1, length) for length in lengths], [Reach(), Reach()], (4, 2))
        with compilations() as names:
            check(case, plan := plan_for(case, lengths), attended(case, plan))
        assert not turn or not names


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs CUDA graphs")
def test_a_captured_graph_follows_requests_that_come_and_go(shortest_unit: int) -> None:
    case = mixed([137, 90, 64, 100, 30])
    kept, query = plan_for(case, [1] * 5), case.query.transpose(0, 1)
    positions = torch.tensor([r.positions[0] for r in case.requests], dtype=torch.int32).to(DEVICE)

    def call() -> Tensor:
        return attend_decode(query, case.pages.kv, kept, positions, scale=case.scale)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for lengths in ([137, 90, 64, 100, 30], [0, 90, 64, 0, 30], [0] * 5, [1, 90, 64, 70, 0]):
        kept.refill(plan_for(case, lengths, device=torch.device("cpu")))
        out.fill_(float("nan"))
        graph.replay()
        check(case, kept, out)


@pytest.mark.parametrize("impl", ["auto", "torch", "triton"])
def test_wrong_shapes_are_refused(impl: str) -> None:
    case = step([4, 5], [Reach(), Reach()], (4, 2), impl="torch")
    query, kv = case.query.transpose(0, 1), case.pages.kv
    positions = torch.tensor([3, 4], dtype=torch.int32, device=DEVICE)
    plan = DecodePlan.of([4, 5], (Reach(), Reach()), DEVICE)
    with pytest.raises(ValueError, match="1 rows at 2 positions for 2 requests"):
        attend_decode(query[:1], kv, plan, positions, scale=1.0, impl=impl)
    with pytest.raises(ValueError, match="2 rows at 1 positions for 2 requests"):
        attend_decode(query, kv, plan, positions[:1], scale=1.0, impl=impl)
    wrong = DecodePlan.of([4, 5], (Reach(),) * 3, DEVICE)
    with pytest.raises(ValueError, match="3 reaches for 2 KV heads"):
        attend_decode(query, kv, wrong, positions, scale=1.0, impl=impl)
    wrong = DecodePlan.of([4, 5, 6], (Reach(),) * 2, DEVICE)
    with pytest.raises(ValueError, match="a plan of 3 requests for 2"):
        attend_decode(query, kv, wrong, positions, scale=1.0, impl=impl)
    if impl == "triton":
        with pytest.raises(ValueError, match="unknown implementation"):
            attend_decode(query, kv, plan, positions, scale=1.0, impl="tritn")
