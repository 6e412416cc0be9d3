"""What is told about a prompt once it is in place."""

import time

import torch

from redknot.engine.counters import STAGE, Counters
from redknot.engine.messages import Report, SegmentReport
from redknot.engine.request import Request
from redknot.execution.executor import Prefilled
from redknot.execution.session import Known, Session
from redknot.segments.lookup import Outcome


def report(session: Session, request: Request, prefilled: Prefilled) -> Report:
    """Counted from the executed plan, not from what was found."""
    plan, known = prefilled.plan, request.known
    computed = plan.layers[0].active  # sets only shrink: whatever ran anywhere ran here
    decision = "asked for" if request.decision is None else request.decision.reason
    if request.submit.exact:
        decision = "exact"
    return Report(
        policy=plan.policy,
        decision=decision,
        prompt_tokens=plan.num_tokens,
        cached_tokens=plan.cached_tokens,
        recomputed_tokens=len(computed),
        flops_share=prefilled.flops_share,
        segments=()
        if known is None
        else tuple(_segment(session, request, known, one, prefilled) for one in known.outcomes),
        seconds={name: round(spent, 6) for name, spent in prefilled.seconds.items()},
    )


def count(counters: Counters, told: Report, exact_tokens: int | None) -> None:
    """Add what a report says to what the engine counts.

    ``exact_tokens`` are what an exact beginning gave; None where none was asked for.
    """
    counters.add("prompt_tokens", told.prompt_tokens)
    counters.add("cached_tokens", told.cached_tokens)
    if exact_tokens is not None:
        counters.add("prefix_queries", told.prompt_tokens)
        counters.add("prefix_hits", exact_tokens)
    for segment in told.segments:
        tokens = segment.stop - segment.start
        counters.add(
            "missed_tokens" if segment.hit == "none" else f"hit_tokens.{segment.hit}", tokens
        )
    for stage, spent in told.seconds.items():
        counters.add(STAGE + stage, spent)


def _segment(
    session: Session, request: Request, known: Known, outcome: Outcome, prefilled: Prefilled
) -> SegmentReport:
    span, computed = outcome.span, prefilled.plan.layers[0].active
    first, stop = torch.searchsorted(computed, torch.tensor([span.start, span.stop])).tolist()
    hit, reason = _tier(session, request, known, outcome), outcome.reason
    layout = prefilled.layout
    taken = span.stop <= layout.exact or (span.start, span.stop) in layout.segments
    if hit != "none" and not taken:
        hit, reason = "none", f"{request.policy.name} takes nothing over"
        if request.policy.takes_exact:
            reason = "its pages were needed by others"
    ids = request.prompt.token_ids[span.start : span.stop]
    return SegmentReport(
        start=span.start,
        stop=span.stop,
        title=span.title,
        hit=hit,  # type: ignore[arg-type]
        reason=reason,
        recomputed=stop - first,
        key=session.key(ids, request.submit.salt).hex(),
    )


def _tier(session: Session, request: Request, known: Known, outcome: Outcome) -> str:
    if outcome.status == "new":
        return "none"
    if outcome.status == "exact":
        return "derived" if request.is_derived else "exact"
    state = next(state for span, state in known.hits if span == outcome.span)
    plane = next(iter(state.planes.values()))
    return "device" if plane.device.type == session.model.adapter.device.type else "host"


def queue_seconds(request: Request) -> float:
    """From the request's arrival until now."""
    return max(0.0, time.time() - request.submit.arrived)
