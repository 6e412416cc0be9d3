"""Counts of visible sets: against explicit masks, brute force and known shares."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from redknot.heads import HeadMap, Phase, retained_share, visible_pairs
from redknot.kernels.attend import Reach
from redknot.kernels.attend.reference import visible

LIMITS = st.none() | st.integers(1, 80)
REACHES = st.builds(
    lambda window, sink, horizon: Reach(window, sink if window else 0, horizon),
    LIMITS,
    st.integers(0, 80),
    LIMITS,
)


@settings(deadline=None)
@given(positions=st.sets(st.integers(0, 150)), reach=REACHES)
def test_pairs_are_the_true_entries_of_the_mask(positions: set[int], reach: Reach) -> None:
    rows = torch.tensor(sorted(positions), dtype=torch.int64)
    assert visible_pairs(rows, reach) == int(visible(rows, 151, reach).sum())


def test_retained_share_counts_tokens_of_all_groups() -> None:
    layers = [(Reach(), Reach(11, 4)), (Reach(101, 4), Reach(horizon=21))]
    # 100 tokens; 4 sinks and the last 10; all, since the next row's window begins at 0; the last 20
    assert retained_share(100, layers) == (100 + 14 + 100 + 20) / 400
    assert retained_share(5, layers) == 1


@pytest.mark.parametrize("num_tokens", [1024, 8192])
def test_share_of_heads_and_share_of_kv_are_two_numbers(num_tokens: int) -> None:
    made = HeadMap.from_scores(torch.rand(4, 8), global_share=0.5, window=256, sink=4)
    reaches = [made.reaches(Phase.DECODE, layer, None) for layer in range(4)]
    local = 4 + 255  # the next token brings the 256th of its window along
    assert made.global_share(Phase.DECODE) == 0.5
    assert retained_share(num_tokens, reaches) == (num_tokens + local) / (2 * num_tokens)
