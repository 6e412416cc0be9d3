"""Policies next to dense on one prompt: for a look, not for a verdict."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from redknot.evaluation.fidelity import fidelity, reference
from redknot.execution.session import Session
from redknot.heads import HeadMap
from redknot.recovery import Policy
from redknot.recovery.policies import Dense
from redknot.segments import Prompt


@dataclass(frozen=True, slots=True)
class Comparison:
    """One policy on one prompt."""

    policy: str
    text: str
    flops_share: float
    ttft: float
    agreement: float
    "Share of dense's greedy answer that the policy's top-1 agrees with."
    kl: float
    "Mean KL(dense || policy) along dense's greedy answer, in nats."
    rows_per_layer: tuple[int, ...]


def compare(
    session: Session,
    prompt: Prompt,
    policies: Sequence[Policy],
    head_map: HeadMap | None,
    max_tokens: int,
) -> list[Comparison]:
    """Dense first; segments are built before anything is measured."""
    session.build_missing(prompt)
    ends = session.model.end_token_ids
    dense = session.prefill(prompt, Dense(), room=2 * max_tokens)
    ref = reference(session.executor, dense, torch.tensor([0]), ends, max_tokens)
    found = []
    for policy in (Dense(), *(policy for policy in policies if policy != Dense())):
        prefilled = dense
        if policy != Dense():
            prefilled = session.prefill(prompt, policy, head_map, room=2 * max_tokens)
        scores = fidelity(session.executor, prefilled, ref, ends, max_tokens)
        found.append(
            Comparison(
                policy=policy.describe(),
                text=session.tokeniser.decode(scores.answer).strip(),
                flops_share=prefilled.flops_share,
                ttft=sum(prefilled.seconds.values()),
                agreement=scores.agreement,
                kl=scores.kl,
                rows_per_layer=tuple(len(layer.active) for layer in prefilled.plan.layers),
            )
        )
    return found
