"""What a reach shows, as spans, against explicit masks."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from redknot.kernels.attend import Reach
from redknot.kernels.attend.reference import visible

LIMITS = st.none() | st.integers(0, 80)
REACHES = st.builds(Reach, LIMITS, st.integers(0, 80), LIMITS)


def tokens(spans: list[tuple[int, int]], num_tokens: int) -> list[int]:
    """Tokens below ``num_tokens`` in ``spans``, each as often as it is listed."""
    return [token for start, stop in spans for token in range(start, min(stop, num_tokens))]


@settings(deadline=None)
@given(num_tokens=st.integers(0, 150), reach=REACHES)
def test_exactly_what_later_rows_see_is_listed_once(num_tokens: int, reach: Reach) -> None:
    later = torch.arange(num_tokens, num_tokens + 170)  # no window reaches further back
    seen = visible(later, num_tokens, reach).any(0).nonzero().flatten().tolist()
    assert tokens(reach.spans(num_tokens), num_tokens) == seen


@settings(deadline=None)
@given(first=st.integers(0, 90), count=st.integers(0, 90), reach=REACHES)
def test_spans_of_some_rows_hold_what_these_rows_see(first: int, count: int, reach: Reach) -> None:
    stop = first + count
    seen = visible(torch.arange(first, stop), stop, reach).any(0).nonzero().flatten().tolist()
    assert tokens(reach.spans(first, stop), stop) == seen
