"""A bench over a tiny model of eight layer groups, and the command line's fixtures."""

import pytest
from tests.cli.conftest import folder, refused
from tests.execution.eager import lively_hf

from redknot.bench.context import Bench
from redknot.bench.maps import MapSettings
from redknot.models.byte_tokenizer import byte_tokenizer
from redknot.models.loading import wrap_model

__all__ = ["folder", "refused"]
PEAK = 1e9  # FLOP/s, so that floors are round figures


def open_bench(num_pages: int | None = None, *, name: str = "llama", window: int = 32) -> Bench:
    """With a rate that is given, not measured: that takes two seconds."""
    model = wrap_model(lively_hf(name), byte_tokenizer(add_bos=True), name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("redknot.bench.context.matmul_rate", lambda device, dtype: PEAK)
        return Bench.open(model, MapSettings(window=window), num_pages=num_pages)


@pytest.fixture(autouse=True)
def _given_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the command line too."""
    monkeypatch.setattr("redknot.bench.context.matmul_rate", lambda device, dtype: PEAK)


@pytest.fixture
def bench() -> Bench:
    return open_bench()
