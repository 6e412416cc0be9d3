"""Pages must come free when they are let go of, not when the collector passes by."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    """Cycles that hold pages show."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
