"""Which tokens policies choose, from signals that are given."""

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from redknot.recovery import Layout, Plan, Policy
from redknot.recovery.policies import CacheBlend, Epic, LayerDrop, Question, QuestionDrop, RedKnot
from redknot.recovery.ranking import top_count, top_share
from redknot.recovery.selection import simulate

LAYERS, GROUPS, TOKENS = 6, 2, 60
LAYOUT = Layout(
    num_tokens=TOKENS,
    exact=0,
    segments=((5, 17), (17, 20), (24, 50)),
    context_end=50,
    probe=(50, 60),
)
STORED = set(LAYOUT.stored.tolist())


def noise(*shape: int, seed: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


@dataclass
class Given:
    """Signals that are known beforehand."""

    mass: Tensor = field(default_factory=lambda: noise(LAYERS, GROUPS, TOKENS, seed=1))
    distance: Tensor = field(default_factory=lambda: noise(TOKENS, seed=2))
    norm: Tensor = field(default_factory=lambda: noise(TOKENS, seed=3))

    def probe_mass(self) -> Tensor:
        return self.mass

    def global_groups(self) -> Tensor:
        return torch.ones(LAYERS, GROUPS, dtype=torch.bool)

    def deviation(self) -> Tensor:
        return self.distance

    def output_norm(self) -> Tensor:
        return self.norm


def made(policy: Policy) -> Plan:
    signals = Given()
    return simulate(policy, LAYOUT, LAYERS, signals.global_groups(), signals)


def flowing(policy: Policy) -> list[set[int]]:
    """Stored tokens that flow, by layer."""
    return [set(layer.active.tolist()) & STORED for layer in made(policy).layers]


def highest(scores: Tensor, among: set[int], count: int) -> set[int]:
    return set(sorted(among, key=lambda token: -float(scores[token]))[:count])


@pytest.mark.parametrize("share", [0.0, 0.01, 0.2, 0.5, 1.0])
def test_question_keeps_what_the_probe_attends_to_in_all_layers(share: float) -> None:
    count = max(1, int(share * len(STORED))) if share else 0
    assert (
        flowing(Question(share=share))
        == [highest(Given().mass.sum((0, 1)), STORED, count)] * LAYERS
    )


@pytest.mark.parametrize("policy", [QuestionDrop(first=0.5, then=0.2, until=0.5), LayerDrop()])
def test_question_drop_ranks_by_the_layers_that_are_still_to_come(policy: QuestionDrop) -> None:
    switch, mass = round(policy.until * LAYERS), Given().mass
    early = highest(mass.sum((0, 1)), STORED, int(policy.first * len(STORED)))
    late = highest(mass[switch:].sum((0, 1)), early, int(policy.then * len(STORED)))
    assert flowing(policy) == [early] * switch + [late] * (LAYERS - switch)
    assert late != highest(mass.sum((0, 1)), early, len(late))  # the example tells them apart


@pytest.mark.parametrize("check_layer", [1, 3])
def test_cacheblend_keeps_what_deviates_most_at_the_check_layer(check_layer: int) -> None:
    policy = CacheBlend(share=0.3, check_layer=check_layer)
    chosen = highest(Given().distance, STORED, int(0.3 * len(STORED)))
    assert flowing(policy) == [STORED] * check_layer + [chosen] * (LAYERS - check_layer)
    ranked = [layer.ranked for layer in made(policy).layers]
    assert ranked == [TOKENS if layer == check_layer else 0 for layer in range(LAYERS)]


@pytest.mark.parametrize("k", [0, 1, 5, 12, 99])
def test_epic_keeps_the_first_tokens_of_each_segment(k: int) -> None:
    heads = {token for start, stop in LAYOUT.segments for token in range(start, stop)[:k]}
    assert flowing(Epic(k=k)) == [heads] * LAYERS


@pytest.mark.parametrize("mass", [0.1, 0.6, 0.95])
def test_redknot_feeds_the_fewest_tokens_that_carry_the_mass(mass: float) -> None:
    importance = Given().norm  # all rows are active, so rows are positions
    whole = sum(float(importance[token]) for token in STORED)
    for index, layer in enumerate(made(RedKnot(dense_until=2, mass=mass, recent=0)).layers):
        if index < 2:
            assert layer.ffn is None
            continue
        fed = set(layer.ffn.tolist())
        assert set(LAYOUT.fresh.tolist()) <= fed
        chosen = fed & STORED
        carried = sorted(float(importance[token]) for token in chosen)
        assert chosen == highest(importance, STORED, len(chosen))
        assert sum(carried) >= mass * whole > sum(carried[1:])


def test_equal_scores_go_to_the_earlier_token() -> None:
    among = torch.tensor([2, 3, 5, 8, 9])
    assert top_count(torch.zeros(10), among, 3).tolist() == [2, 3, 5]
    scores = torch.tensor([9.0, 9, 0, 1, 9, 1, 9, 9, 2, 1])
    assert top_count(scores, among, 3).tolist() == [3, 5, 8]
    assert top_share(scores, among, 0.61).tolist() == [3, 5, 8]
    assert top_count(scores, among, 7).tolist() == among.tolist()
