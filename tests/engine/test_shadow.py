"""The shadow keeps its share, falls back on bad runs only, recovers, and does not flap."""

import math
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from redknot.engine.config import ShadowConfig
from redknot.engine.shadow import MARGIN, ShadowMonitor
from redknot.errors import InputError

shares = st.floats(0, 1)
runs = st.lists(st.floats(0, 1), max_size=200)


@st.composite
def configs(draw: st.DrawFn, **fixed: float) -> ShadowConfig:
    window = draw(st.integers(1, 40))
    drawn = {"threshold": draw(shares), "window": window, "least": draw(st.integers(1, window))}
    return ShadowConfig(**(drawn | fixed))


def lossy(monitor: ShadowMonitor) -> bool:
    return monitor.wants(without_loss=False)


def turns(monitor: ShadowMonitor, agreements: list[float]) -> list[int]:
    """After how many runs each transition came; every one is told once, when it comes."""
    found = []
    for number, agreement in enumerate(agreements, 1):
        before = bool(monitor.fallback)
        monitor.add(agreement)
        message = monitor.transition()
        assert (message is not None) == (before != bool(monitor.fallback))
        assert monitor.transition() is None
        if message is not None:
            found.append(number)
    return found


@given(shares, st.integers(1, 400))
def test_the_share_is_kept_within_one_at_every_count(share: float, count: int) -> None:
    monitor, taken = ShadowMonitor(ShadowConfig(share=share)), 0
    for n in range(1, count + 1):
        taken += lossy(monitor)
        assert abs(taken - n * share) <= 1 + 1e-9  # rounding of the products


def test_no_share_takes_nothing_and_all_takes_all() -> None:
    for share in (0.0, 1.0):
        monitor = ShadowMonitor(ShadowConfig(share=share))
        assert {lossy(monitor) for _ in range(200)} == {bool(share)}


@pytest.mark.parametrize("period", [2, 4, 5, 10, 20])
def test_regular_traffic_does_not_hide(period: int) -> None:
    """Every kind of request in a fixed round gets about its own share."""
    monitor, taken = ShadowMonitor(ShadowConfig(share=1 / period)), [0] * period
    rounds = 400
    for n in range(rounds * period):
        taken[n % period] += lossy(monitor)
    assert min(taken) > 0.5 * rounds / period
    assert max(taken) < 2 * rounds / period


@given(shares, st.lists(st.booleans()))
def test_exempt_requests_are_never_taken_and_do_not_count(share: float, exempt: list[bool]) -> None:
    monitor, other = (ShadowMonitor(ShadowConfig(share=share)) for _ in range(2))
    for one in exempt:
        if one:
            assert not monitor.wants(without_loss=True)
        else:
            assert lossy(monitor) == lossy(other)


@given(configs(), runs)
def test_transitions_are_least_runs_apart(config: ShadowConfig, agreements: list[float]) -> None:
    monitor = ShadowMonitor(config)
    found = [0, *turns(monitor, agreements)]
    assert all(later - sooner >= config.least for sooner, later in pairwise(found))
    assert monitor.fallbacks + monitor.recoveries == len(found) - 1
    assert monitor.fallbacks - monitor.recoveries == bool(monitor.fallback)


@given(configs(), runs)
def test_it_falls_back_exactly_when_the_window_says_so(
    config: ShadowConfig, agreements: list[float]
) -> None:
    monitor = ShadowMonitor(config)
    for number, agreement in enumerate(agreements, 1):
        monitor.add(agreement)
        last = agreements[max(0, number - config.window) : number]
        mean = math.fsum(last) / len(last)
        assume(abs(mean - config.threshold) > 1e-9 or len(set(last)) == 1)
        below = (last[0] if len(set(last)) == 1 else mean) < config.threshold
        assert bool(monitor.fallback) == (number >= config.least and below)
        if monitor.fallback:
            assert f"{len(last)} shadow runs" in monitor.fallback
            return
        assert monitor.agreement == pytest.approx(mean)


@given(configs())
def test_a_mean_at_the_threshold_is_enough(config: ShadowConfig) -> None:
    assert turns(ShadowMonitor(config), [config.threshold] * 2 * config.window) == []


@given(configs(threshold=0.0), runs)
def test_threshold_zero_never_falls_back(config: ShadowConfig, agreements: list[float]) -> None:
    assert turns(ShadowMonitor(config), agreements) == []


@given(configs(), st.integers(0, 60), shares)
def test_it_recovers_after_enough_good_runs_and_not_before(
    config: ShadowConfig, bad: int, height: float
) -> None:
    assume(config.threshold > 1e-6)
    monitor = ShadowMonitor(config)
    assert turns(monitor, [0.0] * config.least) == [config.least]
    assert monitor.agreement is None  # runs from before do not count
    needed = max(config.least, math.ceil(config.window / 2))
    limit = min(1.0, config.threshold + MARGIN)
    good = limit + height * (1 - limit)
    assert turns(monitor, [good] * (needed - 1)) == []
    monitor.add(good)
    assert not monitor.fallback
    assert "answers again" in (monitor.transition() or "")
    turns(monitor, [0.0] * (config.least + bad))
    assert monitor.fallback
    turns(monitor, [1.0] * config.window)  # whatever was bad has left the window
    assert not monitor.fallback


@given(configs(threshold=0.5), st.floats(0, 0.5 + MARGIN, exclude_max=True))
def test_it_does_not_recover_within_the_margin(config: ShadowConfig, middling: float) -> None:
    monitor = ShadowMonitor(config)
    turns(monitor, [0.0] * config.least)
    assert turns(monitor, [middling] * 3 * config.window) == []


def test_an_empty_window_decides_nothing() -> None:
    monitor = ShadowMonitor(ShadowConfig(share=1, threshold=1))
    for _ in range(100):
        lossy(monitor)
    assert (monitor.agreement, monitor.fallback, monitor.transition()) == (None, "", None)


def test_messages_keep_their_order_until_they_are_asked_for() -> None:
    monitor = ShadowMonitor(ShadowConfig(window=4, least=2, threshold=0.8))
    for agreement in (0.25, 0.5, 1.0, 1.0):
        monitor.add(agreement)
    first, second, third = (monitor.transition() for _ in range(3))
    assert first == "agreement 0.375 < 0.8 over 2 shadow runs: dense answers from now on"
    assert second == "agreement 1 >= 0.82 over 2 shadow runs: the policy answers again"
    assert third is None


@pytest.mark.parametrize("agreement", [math.nan, -0.01, 1.01])
def test_an_agreement_is_a_share(agreement: float) -> None:
    monitor = ShadowMonitor(ShadowConfig())
    with pytest.raises(ValueError, match="agreement"):
        monitor.add(agreement)
    assert monitor.agreement is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"share": 1.5},
        {"share": math.nan},
        {"threshold": -0.1},
        {"window": 0, "least": 0},
        {"window": 4, "least": 5},
        {"least": 0},
    ],
)
def test_settings_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InputError):
        ShadowMonitor(ShadowConfig(**wrong))
