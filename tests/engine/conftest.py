"""Pages come free when they are let go of, and nobody measures how fast this machine is."""

import gc
from collections.abc import Iterator

import pytest

from redknot.execution import planner
from redknot.recovery.cost import Rates

RATES = Rates(matmul=5e9, causal=2e9, gathered=1e9, relocate=1e9, layer_overhead=1e-4)


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    """Cycles that hold pages show."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(autouse=True)
def known_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring takes longer than most tests."""
    monkeypatch.setattr(planner, "calibrate", lambda executor: RATES)
