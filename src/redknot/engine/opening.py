"""A request's first turn: what is known of its prompt, which policy runs, and its work."""

from dataclasses import dataclass, replace

from redknot.engine.request import Request
from redknot.execution.beginnings import Beginning
from redknot.execution.clock import Clock
from redknot.execution.planner import Decision, Planner
from redknot.execution.session import Known, Session
from redknot.heads import HeadMap
from redknot.recovery import Policy
from redknot.recovery.policies import Dense, Prefix

UNCHANGED = (Dense(), Prefix())
"Policies that compute what the unmodified model does."


@dataclass(eq=False)
class Opening:
    """How prompts begin to be computed."""

    session: Session
    planner: Planner
    head_map: HeadMap | None
    map_digest: str
    planned: bool

    def begin(self, request: Request, fallback: str) -> None:
        """Give ``request`` its work; with a ``fallback``, which says why, dense runs.

        One that was preempted does what it did before, over what is left of the beginning that it
        had found.
        """
        device = self.session.model.adapter.device
        request.clock = request.clock or Clock(device, takes_turns=True)
        if request.known is None:
            request.known, request.decision = self._decide(request, fallback)
            request.clock.mark("lookup")
        else:
            request.known = self._again(request, request.known)
        known = request.known
        beginning = None if known.beginning is None else known.beginning.cache
        request.work = self.session.executor.prefilling(
            request.prompt.token_ids,
            known,
            request.policy,
            self.head_map,
            beginning=beginning,
            clock=request.clock,
            copied=request.submit.exact,
        )

    def chain(self, policy: Policy) -> str:
        """What distinguishes the state that ``policy`` makes; empty where it is dense's."""
        return "" if policy in UNCHANGED else f"{policy.describe()} {self.map_digest}"

    def _decide(self, request: Request, fallback: str) -> tuple[Known, Decision]:
        prompt, salt, asked = request.prompt, request.submit.salt, request.asked
        exact = self.session.look_up(prompt, salt=salt)
        if request.submit.exact:
            return replace(exact, beginning=None), Decision(Dense(), "exact")
        if fallback:
            return exact, Decision(Prefix(), fallback)
        known = self._with_derived(request, exact)
        if not self.planned:
            return known, Decision(asked, "asked for, without planning")
        decision = self.planner.decide(known.layout, asked, self.head_map, exact.layout)
        return (exact if decision.policy in UNCHANGED else known), decision

    def _with_derived(self, request: Request, exact: Known) -> Known:
        """What an earlier turn of the same chat has left, if that is more than what is exact.

        Pages that its later tokens no longer saw are missing; then only rows that see no more than
        those did may follow.
        """
        chain = self.chain(request.asked)
        if not chain:
            return exact
        known = self.session.look_up(request.prompt, salt=request.submit.salt, chain=chain)
        found = known.beginning
        if found is None or not found.scope.chain:
            return exact
        new_context = any(span.stop > found.tokens for span in request.prompt.spans)
        return exact if new_context and not found.cache.holds(found.tokens) else known

    def _again(self, request: Request, known: Known) -> Known:
        """``known`` over pages that are still there; what has gone is computed."""
        before = known.beginning
        if before is None:
            return known
        salt, chain = request.submit.salt, before.scope.chain
        found = self.session.look_up(request.prompt, salt=salt, chain=chain).beginning
        same = found is not None and found.scope == before.scope
        if found is not None and same and self._covers(found, before):
            return replace(known, beginning=found)
        layout = known.layout.limited(exact=0, segments=True)
        return replace(known, beginning=None, layout=layout)

    @staticmethod
    def _covers(found: Beginning, before: Beginning) -> bool:
        """What an approximation left has no shorter form: windows have given pages back."""
        return found.tokens == before.tokens or (
            found.tokens > before.tokens and not found.scope.chain
        )
