"""The kernels run on the GPU where there is one, under Triton's interpreter elsewhere."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.kernels.inputs import DEVICE, poisoned


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On a GPU the whole folder is the `gpu` suite."""
    for item in items:
        if DEVICE.type == "cuda" and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture
def poison() -> Iterator[None]:
    """Fresh memory holds NaN."""
    with poisoned():
        yield
