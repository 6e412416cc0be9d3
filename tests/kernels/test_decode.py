"""Decode: one row of each request against float64, however its keys are split."""

import random

import pytest
import torch
from tests.kernels.inputs import DEVICE, DIMS, DTYPES, HEADS, PAGE_SIZES, Request, columns, poisoned
from tests.kernels.test_attend import Case
from torch import Tensor

from redknot.kernels.attend import DecodePlan, Reach, attend_decode, decode
from redknot.kernels.attend import decode_triton as kernel

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


def run(case: Case, planned: list[int], *, impl: str = "triton", target_units: int = 264) -> Tensor:
    reaches = tuple(case.requests[0].reaches)
    plan = DecodePlan.of(planned, reaches, DEVICE, target_units=target_units)
    positions = torch.tensor([r.positions[0] for r in case.requests], dtype=torch.int32).to(DEVICE)
    query = case.query.transpose(0, 1)
    with poisoned():
        return attend_decode(query, case.pages.kv, plan, positions, scale=case.scale, impl=impl)


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


@pytest.mark.parametrize("seed", range(10))
def test_units_cover_every_stream_once_and_are_about_equal(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "MIN_UNIT_TOKENS", 8)
    draw = random.Random(seed)
    lengths = [draw.randrange(1, 5000) for _ in range(draw.randrange(1, 9))]
    reaches = tuple(draw.choices(REACHES, k=draw.randrange(1, 6)))
    target = draw.choice([1, 10, 264])
    plan = DecodePlan.of(lengths, reaches, DEVICE, target_units=target)
    units = plan.units.cpu().tolist()
    streams = len(lengths) * len(reaches)
    found: dict[int, list[tuple[int, int, int]]] = {stream: [] for stream in range(streams)}
    for stream, split, splits, slot in units:
        found[stream].append((split, splits, slot))
    joined = {stream: (splits, first) for stream, splits, first in plan.split_streams.tolist()}
    slots = []
    for stream, own in found.items():
        assert sorted(split for split, _, _ in own) == list(range(len(own)))
        assert {splits for _, splits, _ in own} == {len(own)}
        assert (stream in joined) == (len(own) > 1)
        if len(own) > 1:
            assert joined[stream][0] == len(own)
            assert all(slot == joined[stream][1] + split for split, _, slot in own)
            slots += [slot for _, _, slot in own]
    assert sorted(slots) == list(range(plan.num_slots))
    assert len(units) <= target + streams
    seen = [_seen(length, reach) for length in lengths for reach in reaches]
    largest = max(8, -(-sum(seen) // target))
    assert all(seen[stream] <= splits * largest for stream, _, splits, _ in units)
    shares = [seen[stream] / splits for stream, _, splits, _ in units]
    assert shares == sorted(shares, reverse=True)


def _seen(length: int, reach: Reach) -> int:
    """Keys that the row at ``length - 1`` sees, counted by hand."""
    return sum(
        (reach.window is None or j > length - 1 - reach.window or j < reach.sink)
        and (reach.horizon is None or j > length - 1 - reach.horizon)
        for j in range(length)
    )


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
    if impl == "triton":
        with pytest.raises(ValueError, match="unknown implementation"):
            attend_decode(query, kv, plan, positions, scale=1.0, impl="tritn")
