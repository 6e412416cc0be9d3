"""Choosing on a device: what a policy keeps, what it feeds, and nothing read on the host."""

import random
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from redknot.recovery import Layout, Policy, Stage
from redknot.recovery.policies import RedKnot
from redknot.recovery.selection import select, skip

LAYERS, GROUPS = 6, 2
LAYOUT = Layout(
    num_tokens=40, exact=8, segments=((5, 17), (17, 20), (24, 33)), context_end=33, probe=(35, 40)
)
STORED = [*range(8, 20), *range(24, 33)]
FRESH = [20, 21, 22, 23, *range(33, 40)]


@dataclass(frozen=True, kw_only=True)
class Keeps(Policy):
    """Keeps what it is told to."""

    kept: Any = None
    asked: list[int] = field(default_factory=list)

    name: ClassVar = "keeps"

    def keep(self, stage: Stage) -> Tensor:
        self.asked.append(stage.layer)
        return stage.active if self.kept is None else torch.tensor(self.kept, dtype=torch.int64)


@dataclass
class Given:
    """Signals that are known beforehand."""

    norm: Tensor
    mass: Tensor

    def output_norm(self) -> Tensor:
        return self.norm

    def probe_mass(self) -> Tensor:
        return self.mass

    def global_groups(self) -> Tensor:
        return torch.ones(LAYERS, GROUPS, dtype=torch.bool)

    def deviation(self) -> Tensor:
        return self.norm


def stage_of(active: list[int], layout: Layout = LAYOUT, **options: Any) -> Stage:
    """In the middle of a pass; the signals are whole numbers, which float32 adds up exactly."""
    rows = torch.cat([torch.tensor(active, dtype=torch.int64), layout.fresh]).sort().values
    signals = Given(torch.zeros(len(rows)), torch.zeros(LAYERS, GROUPS, layout.num_tokens))
    skipped = torch.zeros(layout.num_tokens, dtype=torch.bool)
    stage = Stage(
        layer=3, num_layers=LAYERS, layout=layout, signals=signals,
        active=torch.tensor(active, dtype=torch.int64), rows=rows, skipped=skipped,
    )  # fmt: skip
    return replace(stage, **options)


class Waits(TorchDispatchMode):
    """Counts values that the host reads."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the tensors that are brought to the host."""
    found: list[int] = []
    cpu = torch.Tensor.cpu

    def watched(self: Tensor) -> Tensor:
        found.append(self.numel())
        return cpu(self)

    def refused(self: Tensor) -> Any:
        raise AssertionError("a tensor is read on the host")

    monkeypatch.setattr(torch.Tensor, "cpu", watched)
    for name in ("tolist", "item", "numpy", "__int__", "__float__"):
        monkeypatch.setattr(torch.Tensor, name, refused)
    return found


def test_the_layout_of_these_tests_is_what_they_say() -> None:
    assert LAYOUT.stored.tolist() == STORED
    assert LAYOUT.fresh.tolist() == FRESH


@pytest.mark.parametrize("seed", range(20))
def test_what_the_policy_keeps_flows_with_what_is_fresh(seed: int) -> None:
    draw = random.Random(seed)
    active = sorted(draw.sample(STORED, draw.randint(1, len(STORED))))
    kept = draw.sample(active, draw.randint(0, len(active)))  # in any order
    stage = stage_of(active)
    chosen = select(Keeps(kept=kept), stage)
    assert chosen is not None
    assert chosen.active.tolist() == sorted(kept)
    assert chosen.rows.tolist() == chosen.host_rows.tolist() == sorted(kept + FRESH)
    assert chosen.host_rows.dtype == chosen.rows.dtype == torch.int64
    assert stage.active.tolist() == active


def test_nothing_changes_where_the_policy_keeps_all_or_nothing_is_active() -> None:
    policy = Keeps()
    assert select(policy, stage_of(STORED)) is None
    assert policy.asked == [3]
    assert select(policy, stage_of([])) is None
    assert policy.asked == [3]  # it is not asked about nothing


@pytest.mark.parametrize(
    "kept",
    [
        [12],
        [8, 12],
        [8, 8],
        [9, 8, 9],
        [33],
        [39],
        [40],
        [400],
        [1 << 40],
        [-1],
        [8, -40],
        [0],
        [7],
    ],
    ids=str,
)
def test_a_policy_may_only_narrow_what_is_active(kept: list[int]) -> None:
    """Gone before, twice, fresh, beyond the prompt, before it, exact."""
    active = [8, 9, 10, 24, 32]
    with pytest.raises(ValueError, match=r"keeps:.* not active at layer 3"):
        select(Keeps(kept=kept), stage_of(active))
    assert select(Keeps(kept=active), stage_of(active)) is not None


@pytest.mark.parametrize("kept", [[-1], [-40], [-1, 0], [0, 40], [-(1 << 40)]], ids=str)
def test_a_position_outside_the_prompt_is_not_its_first_token(kept: list[int]) -> None:
    """Which is active here."""
    layout = replace(LAYOUT, exact=0, segments=((0, 17),))
    with pytest.raises(ValueError, match="not active"):
        select(Keeps(kept=kept), stage_of([0, 1, 2], layout))
    assert select(Keeps(kept=[0]), stage_of([0, 1, 2], layout)) is not None


def test_the_host_waits_once_to_select(copies: list[int]) -> None:
    stage, policy = stage_of(STORED), Keeps(kept=[8, 9, 24])
    with Waits() as waits:
        chosen = select(policy, stage)
    assert chosen is not None
    assert copies == [len(FRESH) + 3 + 1]  # the rows, and whether they are sound
    assert waits.count <= 1  # the flag, which is on the host by then


def test_rows_that_miss_an_ffn_are_marked_and_stay_so() -> None:
    draw = random.Random(0)
    skipped, missed = torch.zeros(40, dtype=torch.bool), set()
    for _ in range(12):
        rows = sorted(draw.sample(range(40), draw.randint(0, 10)))
        fed = sorted(draw.sample(rows, draw.randint(0, len(rows))))
        skip(skipped, torch.tensor(rows, dtype=torch.int64), torch.tensor(fed, dtype=torch.int64))
        missed |= set(rows) - set(fed)
        assert set(skipped.nonzero().flatten().tolist()) == missed
        before = skipped.clone()
        skip(skipped, torch.arange(40), None)  # all run the FFN
        assert torch.equal(skipped, before)
    assert 0 < len(missed) < 40


def fed_by(policy: RedKnot, stage: Stage) -> list[int] | None:
    """`RedKnot.feed` as its docstrings have it, token by token."""
    rows, active = stage.rows.tolist(), stage.active.tolist()
    if stage.layer < policy.dense_until or not active:
        return None
    if policy.signal == "question":
        mass = stage.signals.probe_mass()[stage.layer :].sum((0, 1)).tolist()
        importance = {token: Fraction(mass[token]) for token in active}
    else:
        norms = dict(zip(rows, stage.signals.output_norm().tolist(), strict=True))
        importance = {token: Fraction(norms[token]) for token in active}
    ordered = sorted(active, key=lambda token: (-importance[token], token))
    if policy.mass:
        wanted, chosen, carried = Fraction(policy.mass) * sum(importance.values()), [], Fraction(0)
        for token in ordered:
            if carried >= wanted:
                break
            chosen.append(token)
            carried += importance[token]
    else:
        chosen = ordered[: max(1, int(policy.share * len(active)))] if policy.share else []
    recent = active[max(0, len(active) - policy.recent) :]
    return sorted({*chosen, *recent, *(row for row in rows if row not in STORED)})


@pytest.mark.parametrize("signal", ["output", "question"])
@pytest.mark.parametrize("mass", [0, 0.125, 0.5, 0.75, 1])
@pytest.mark.parametrize("levels", [1, 3, 1000], ids=lambda n: f"{n} levels")
def test_redknot_feeds_what_its_description_says(levels: int, mass: float, signal: str) -> None:
    """With shares of the mass that float32 holds exactly, and few levels for many ties."""
    draw = random.Random(levels)
    generator = torch.Generator().manual_seed(levels)
    for _ in range(60):
        active = sorted(draw.sample(STORED, draw.randint(1, len(STORED))))
        stage = stage_of(active, layer=draw.randrange(LAYERS))
        shapes = (len(stage.rows),), (LAYERS, GROUPS, LAYOUT.num_tokens)
        numbers = [torch.randint(1, levels + 1, s, generator=generator).float() for s in shapes]
        stage = replace(stage, signals=Given(*numbers))
        policy = RedKnot(
            dense_until=draw.choice([0, 1, 3, 6]),
            mass=mass,
            share=draw.choice([0, 0.01, 0.2, 0.5, 1]),
            recent=draw.choice([0, 1, 4, 100]),
            signal=signal,
        )
        found = policy.feed(stage)
        assert (None if found is None else found.tolist()) == fed_by(policy, stage)


def test_rows_without_importance_are_not_needed() -> None:
    """All the mass is on two tokens."""
    stage = stage_of(STORED)
    norm = torch.zeros(len(stage.rows))
    norm[torch.searchsorted(stage.rows, torch.tensor([10, 30]))] = 5.0
    stage = replace(stage, signals=Given(norm, torch.zeros(LAYERS, GROUPS, 40)))
    for mass, chosen in ((0.5, [10]), (0.5001, [10, 30]), (1, [10, 30])):
        found = RedKnot(dense_until=0, mass=mass, recent=0).feed(stage)
        assert found is not None
        assert found.tolist() == sorted(FRESH + chosen)


@pytest.mark.parametrize("signal", ["output", "question"])
@pytest.mark.parametrize("mass", [0, 0.5])
def test_redknot_decides_without_the_host(mass: float, signal: str, copies: list[int]) -> None:
    stage = stage_of(STORED)
    policy = RedKnot(dense_until=0, mass=mass, signal=signal, recent=3, guard=True)
    with Waits() as waits:
        fed, published = policy.feed(stage), policy.publish(stage)
    assert fed is not None
    assert published is not None
    assert copies == []
    assert waits.count == 0
