"""The clock charges every moment between its first and its last mark to one stage."""

from collections.abc import Iterator
from itertools import count, pairwise

import pytest
import torch

from redknot.execution import clock as module
from redknot.execution.clock import Clock

CPU = torch.device("cpu")


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the host's clock has said: n squared, so that no two stretches are as long."""
    said: list[float] = []
    squares: Iterator[float] = (float(n * n) for n in count(1))

    def now() -> float:
        said.append(next(squares))
        return said[-1]

    monkeypatch.setattr(module.time, "perf_counter", now)
    return said


def fail(clock: Clock) -> None:
    clock.part("project")
    raise KeyError("lost")


def stretches(ticks: list[float]) -> list[float]:
    return [after - before for before, after in pairwise(ticks)]


def test_marks_are_charged_with_what_lies_before_them(ticks: list[float]) -> None:
    clock = Clock(CPU)
    for name in ("first", "second", "third"):
        clock.mark(name)
    assert list(clock.seconds) == ["first", "second", "third"]
    assert list(clock.seconds.values()) == stretches(ticks) == [3, 5, 7]


def test_a_name_that_comes_again_adds_to_its_stage(ticks: list[float]) -> None:
    clock = Clock(CPU)
    for name in ("a", "b", "a", "a", "c"):
        clock.mark(name)
    found = stretches(ticks)
    assert clock.seconds == {"a": found[0] + found[2] + found[3], "b": found[1], "c": found[4]}
    assert list(clock.seconds) == ["a", "b", "c"]  # in the order of their first marks


@pytest.mark.parametrize("detailed", [False, True])
def test_stages_add_up_to_the_time_from_the_first_mark_to_the_last(
    detailed: bool, ticks: list[float]
) -> None:
    clock = Clock(CPU, detailed=detailed)
    for stage in ("relocate", "recover", "recover"):
        with clock.stage(stage):
            for part in ("project", "attend", "project"):
                clock.part(part)
    clock.mark("finish")
    seconds = clock.seconds
    assert sum(seconds.values()) == ticks[-1] - ticks[0]
    assert clock.seconds == seconds  # asking takes no time


def test_parts_are_named_after_their_stage_and_leave_it_the_rest(ticks: list[float]) -> None:
    clock = Clock(CPU, detailed=True)
    with clock.stage("recover"):
        clock.part("project")
        clock.part("attend")
        clock.part("project")
    found = stretches(ticks)
    assert clock.seconds == {
        "recover/project": found[0] + found[2],
        "recover/attend": found[1],
        "recover": found[3],
    }


def test_without_detail_parts_cost_no_mark(ticks: list[float]) -> None:
    clock = Clock(CPU)
    with clock.stage("recover"):
        clock.part("project")
        clock.part("attend")
    assert len(ticks) == 2
    assert clock.seconds == {"recover": ticks[1] - ticks[0]}


@pytest.mark.parametrize("detailed", [False, True])
def test_what_fails_is_charged_to_the_stage_that_failed(detailed: bool, ticks: list[float]) -> None:
    clock = Clock(CPU, detailed=detailed)
    clock.mark("lookup")
    with pytest.raises(KeyError, match="lost"), clock.stage("recover"):
        fail(clock)
    with clock.stage("decode"):
        clock.part("attend")
    seconds = clock.seconds
    assert sum(seconds.values()) == ticks[-1] - ticks[0]
    parts = {"recover/project", "decode/attend"} if detailed else set()
    assert set(seconds) == {"lookup", "recover", "decode"} | parts
    assert seconds["recover"] == stretches(ticks)[2 if detailed else 1]


def test_the_time_between_two_stages_belongs_to_the_later_one(ticks: list[float]) -> None:
    clock = Clock(CPU)
    with clock.stage("first"):
        pass
    module.time.perf_counter()  # something else happens
    with clock.stage("second"):
        pass
    assert clock.seconds == {"first": ticks[1] - ticks[0], "second": ticks[3] - ticks[1]}


def test_a_clock_without_marks_has_no_stages() -> None:
    assert Clock(CPU).seconds == {}


def test_a_clock_of_the_host_measures_real_time() -> None:
    before = module.time.perf_counter()
    clock = Clock(CPU)
    with clock.stage("wait"):
        module.time.sleep(0.01)
    between = module.time.perf_counter() - before
    assert 0.01 <= clock.seconds["wait"] <= between


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="events of a GPU")
def test_a_clock_of_a_device_measures_its_work_and_not_its_launch() -> None:
    device = torch.device("cuda")
    factor = torch.randn(4096, 4096, device=device)
    for _ in range(2):  # the first round warms up
        before = module.time.perf_counter()
        clock = Clock(device)
        with clock.stage("much"):
            for _ in range(100):
                factor @ factor
        launched = module.time.perf_counter() - before
        with clock.stage("little"):
            factor @ factor
        seconds = clock.seconds
        passed = module.time.perf_counter() - before
    assert list(seconds) == ["much", "little"]
    assert launched < seconds["much"] < passed
    assert 0 < seconds["little"] < seconds["much"]
    assert sum(seconds.values()) < passed
