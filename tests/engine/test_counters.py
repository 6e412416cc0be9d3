"""Counters count what they know, and a use count is a number whatever was measured."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redknot.engine.counters import MEANINGS, STAGE, Counters, break_even_uses

amounts = st.floats(0, 1e9)


@given(st.lists(st.tuples(st.sampled_from([*MEANINGS, f"{STAGE}probe"]), amounts)))
def test_a_counter_is_the_sum_of_what_was_added(added: list[tuple[str, float]]) -> None:
    counters, sums = Counters(), dict.fromkeys(MEANINGS, 0.0)
    for name, value in added:
        counters.add(name, value)
        sums[name] = sums.get(name, 0.0) + value
    assert counters.snapshot() == sums


def test_one_is_added_by_default_and_a_snapshot_stays_as_it_was() -> None:
    counters = Counters()
    counters.add("steps")
    before = counters.snapshot()
    counters.add("steps")
    assert (before["steps"], counters.snapshot()["steps"]) == (1, 2)


@pytest.mark.parametrize(
    "name", ["promt_tokens", "requests.", "requests.stopped", STAGE, "", "sum"]
)
def test_an_unknown_name_is_an_error_and_leaves_nothing(name: str) -> None:
    counters = Counters()
    with pytest.raises(KeyError):
        counters.add(name)
    assert set(counters.snapshot()) == set(MEANINGS)


@given(amounts, amounts, amounts, st.floats(-1e9, 1e9) | st.just(5e-324))
def test_uses_are_a_number_from_zero_or_minus_one(
    builds: float, spent: float, hits: float, saved: float
) -> None:
    uses = break_even_uses(builds, spent, hits, saved)
    assert math.isfinite(uses)
    assert uses >= 0 or uses == -1
    if hits and saved < 0 and builds and spent:
        assert uses == -1


@given(st.integers(1, 100), st.integers(1, 100), st.floats(0.01, 10), st.floats(0.01, 10))
def test_that_many_hits_save_what_a_build_costs(
    builds: int, hits: int, each_build: float, each_hit: float
) -> None:
    uses = break_even_uses(builds, builds * each_build, hits, hits * each_hit)
    assert uses * each_hit == pytest.approx(each_build)


def test_nothing_built_has_paid_and_nothing_saved_never_pays() -> None:
    assert break_even_uses(0, 0.0, 7, 3.0) == 0
    assert break_even_uses(2, 1.0, 0, 0.0) == -1
    assert break_even_uses(2, 1.0, 5, 0.0) == -1
    assert break_even_uses(1, 1e300, 1e300, 1e-300) == -1
