"""One timed request: from a list of token ids to the id of the first new token."""

import time
from dataclasses import dataclass

import torch

from redknot.bench.dense_peer import DensePeer
from redknot.bench.machine import synchronise
from redknot.bench.prompts import Request
from redknot.bench.setting import Setting
from redknot.execution import Prefilled
from redknot.execution.clock import Clock
from redknot.execution.planner import Decision, Planner
from redknot.execution.session import Session
from redknot.heads import HeadMap


@dataclass(frozen=True, slots=True, eq=False)
class Timed:
    """What one run gave; it holds the request's pages."""

    seconds: float
    "By the wall, ended by reading the token's id."
    token: int
    prefilled: Prefilled
    decision: Decision | None


@dataclass(frozen=True, slots=True, eq=False)
class Runner:
    """A setting on a session."""

    session: Session
    setting: Setting
    head_map: HeadMap | None = None
    planner: Planner | None = None
    "Where one decides whether the policy runs at all."

    def run(self, request: Request, *, detailed: bool = False) -> Timed:
        """Everything from the ids on, what the prompt begins with included."""
        session, policy, decision = self.session, self.setting.policy, None
        session.forget(segments=False)
        ids = list(request.token_ids)
        device = session.model.adapter.device
        synchronise(device)
        start = time.perf_counter()
        clock = Clock(device, detailed=detailed)
        prompt = request.prompt(ids)
        lookup = session.look_up(prompt)
        clock.mark("lookup")
        if self.planner is not None:
            decision = self.planner.decide(lookup.layout, policy, self.head_map)
            policy = decision.policy
            clock.mark("plan")
        prefilled = session.prefill(prompt, policy, self.head_map, lookup=lookup, clock=clock)
        token = int(prefilled.logits.argmax())
        clock.mark("sample")
        return Timed(time.perf_counter() - start, token, prefilled, decision)


def run_peer(peer: DensePeer, request: Request, device: torch.device) -> tuple[float, int]:
    """Seconds and the first token of a dense peer, counted alike."""
    ids = list(request.token_ids)
    synchronise(device)
    start = time.perf_counter()
    token = int(peer.prefill(torch.tensor(ids)).argmax())
    return time.perf_counter() - start, token
