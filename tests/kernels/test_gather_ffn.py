"""FFN of some rows: those change, the others do not, and blocks do not matter."""

import pytest
import torch
from tests.kernels.inputs import DEVICE
from torch import Tensor

from redknot.kernels.gather_ffn import gather_ffn


def hidden() -> Tensor:
    return torch.randn(20, 8, generator=torch.Generator().manual_seed(0)).to(DEVICE)


def ffn(rows: Tensor) -> Tensor:
    """By element, so that no company of rows can change its rounding."""
    return rows.sin() + 1


@pytest.mark.parametrize("row_block", [1, 3, 6, 7, 100])
@pytest.mark.parametrize("chosen", [[], [3], [19, 0, 7], [0, 2, 3, 5, 11, 19]])
def test_exactly_the_given_rows_change(chosen: list[int], row_block: int) -> None:
    states, before = hidden(), hidden()
    sizes = []

    def counted(rows: Tensor) -> Tensor:
        sizes.append(len(rows))
        return ffn(rows)

    index = torch.tensor(chosen, dtype=torch.int64, device=DEVICE)
    found = gather_ffn(states, counted, index, row_block=row_block)
    assert found is states
    before[index] += ffn(before[index])
    assert torch.equal(states, before)
    assert sum(sizes) == len(chosen)
    assert max(sizes, default=0) <= row_block


@pytest.mark.parametrize("row_block", [0, -1])
def test_blocks_without_rows_are_refused(row_block: int) -> None:
    with pytest.raises(ValueError, match="rows"):
        gather_ffn(hidden(), ffn, torch.arange(3, device=DEVICE), row_block=row_block)
