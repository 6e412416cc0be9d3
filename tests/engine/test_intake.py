"""Intake: who is due first by what is stored, and what a layer costs that was only launched."""

import pytest
import torch
from tests.engine.world import World, prompt_of, segments

from redknot.engine.scheduler import Job

A, B = segments(200, 150)
LAYERS = 4


def job(world: World, name: str, policy: str | None = None) -> Job:
    """Of a request over both documents."""
    message = world.message(prompt_of(A, B), name=name, policy=policy, arrived=1.0)
    intake = world.engine.intake
    return intake.job(intake.request(message))


def test_what_is_stored_makes_a_request_due_sooner() -> None:
    world = World(policy="reuse")
    cold = job(world, "cold")
    assert cold.ms == world.engine.intake.milliseconds(len(prompt_of(A, B)))
    world.build(A)
    half = job(world, "half")
    world.build(B)
    warm = job(world, "warm")
    assert warm.due < half.due < cold.due
    assert job(world, "dense", policy="dense").due == cold.due  # which takes nothing over
    other = world.message(prompt_of(A, B), name="other", salt="b", arrived=1.0)
    intake = world.engine.intake
    assert intake.job(intake.request(other)).due == cold.due


def test_a_look_at_what_is_stored_is_no_use_of_it() -> None:
    world = World(policy="reuse")
    world.build(A, B)
    before, order = world.session.store.usage(), world.session.store.keys()
    job(world, "warm")
    assert world.session.store.usage() == before
    assert world.session.store.keys() == order


@pytest.mark.parametrize("rows", [0, 1, 300])
def test_a_launch_is_charged_what_its_rows_will_take(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU has done the work when its time is taken; a GPU has only been told."""
    intake = World().engine.intake
    assert intake.pace(0.5, rows) == 0.5
    predicted = intake.milliseconds(rows) / LAYERS
    adapter = intake.session.model.adapter
    monkeypatch.setattr(adapter, "device", torch.device("cuda"))
    assert intake.pace(predicted / 2, rows) == predicted
    assert intake.pace(2 * predicted, rows) == 2 * predicted
