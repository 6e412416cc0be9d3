"""What of a prompt is already known: from spans and a store to a layout."""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Int
from torch import Tensor

from redknot.recovery import Layout
from redknot.segments.identity import Namespace
from redknot.segments.prompt import Prompt, Span
from redknot.segments.state import SegmentState
from redknot.segments.store import SegmentStore


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one span, and why."""

    span: Span
    status: Literal["exact", "stored", "new"]
    reason: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Lookup:
    """Everything known of a prompt before it is run."""

    layout: Layout
    hits: tuple[tuple[Span, SegmentState], ...]
    outcomes: tuple[Outcome, ...]

    @property
    def missing(self) -> tuple[Span, ...]:
        """Spans without state."""
        return tuple(outcome.span for outcome in self.outcomes if outcome.status == "new")


@dataclass(frozen=True, slots=True)
class StateShape:
    """What state of this model looks like; anything else is a miss."""

    layers: int
    groups: int
    dim: int
    dtype: torch.dtype

    def num_bytes(self, tokens: int) -> int:
        """Size of the state of so many tokens."""
        return 2 * self.layers * self.groups * self.dim * tokens * self.dtype.itemsize

    def refuses(self, state: SegmentState, token_ids: Int[Tensor, "token"]) -> str:
        """Why ``state`` is not the state of ``token_ids``; empty if it is."""
        if not torch.equal(state.token_ids, token_ids):
            return "the stored tokens are others"
        if not state.fits((self.layers, self.groups, self.dim), self.dtype):
            return "the stored state is not whole"
        return ""


def look_up(
    prompt: Prompt,
    namespace: Namespace,
    store: SegmentStore,
    shape: StateShape,
    exact: int = 0,
) -> Lookup:
    """Find the state of every span; the first ``exact`` tokens need none.

    A doubt about stored state is a miss.
    """
    anchored = tuple(prompt.token_ids[: len(namespace.anchor)].tolist()) == namespace.anchor
    shared = min(exact, len(prompt) - 1)  # the last row gives the first new token
    hits, outcomes = [], []
    for span in prompt.spans:
        if span.stop <= shared:
            outcomes.append(Outcome(span, "exact"))
            continue
        if not anchored:
            reason = "the prompt does not start with the anchor"
            outcomes.append(Outcome(span, "new", reason))
            continue
        state, reason = _find(prompt, span, namespace, store, shape)
        if state is not None:
            hits.append((span, state))
        outcomes.append(Outcome(span, "new" if state is None else "stored", reason))
    layout = Layout(
        num_tokens=len(prompt),
        exact=shared,
        segments=tuple((span.start, span.stop) for span, _ in hits),
        context_end=max((span.stop for span in prompt.spans), default=0),
        probe=prompt.probe,
    )
    return Lookup(layout, tuple(hits), tuple(outcomes))


def _find(
    prompt: Prompt, span: Span, namespace: Namespace, store: SegmentStore, shape: StateShape
) -> tuple[SegmentState | None, str]:
    token_ids = prompt.token_ids[span.start : span.stop]
    state = store.get(namespace.key("segment", token_ids))
    if state is None:
        return None, "not stored"
    doubt = shape.refuses(state, token_ids)
    return (None, doubt) if doubt else (state, "")
