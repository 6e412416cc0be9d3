"""One request on its way, and its choices."""

from dataclasses import dataclass, field

from redknot.engine.messages import Ended, Submit
from redknot.engine.sampling import Picker
from redknot.execution.clock import Clock
from redknot.execution.executor import Prefilled
from redknot.execution.planner import Decision
from redknot.execution.session import Known
from redknot.execution.turns import Turns
from redknot.recovery import Policy
from redknot.segments import Prompt


@dataclass(eq=False)
class Choice:
    """One answer."""

    request: "Request"
    number: int
    picker: Picker
    tokens: list[int] = field(default_factory=list)
    "Chosen so far; the last one has no K/V yet."
    ended: Ended | None = None

    def end(self) -> Ended | None:
        """Why this choice is complete, if it is."""
        spec, token = self.request.submit.sampling, self.tokens[-1]
        request_id = self.request.request_id
        if token in self.request.stop_tokens:
            return Ended(request_id=request_id, choice=self.number, reason="stop", stop_token=token)
        if len(self.tokens) >= spec.max_tokens:
            return Ended(request_id=request_id, choice=self.number, reason="length")
        return None


@dataclass(eq=False)
class Request:
    """A request from its arrival to its last token."""

    submit: Submit
    prompt: Prompt
    asked: Policy
    "The policy that is wanted; the planner may run dense."
    stop_tokens: frozenset[int]
    choices: list[Choice] = field(default_factory=list)
    known: Known | None = None
    "What was found at its first turn. Kept, so that one that was preempted does the same again."
    decision: Decision | None = None
    clock: Clock | None = None
    work: Turns[Prefilled] | None = None
    prefilled: Prefilled | None = None
    rows: int = 0
    "That the last unit of work ran through a layer."

    @property
    def request_id(self) -> str:
        """As the server calls it."""
        return self.submit.request_id

    @property
    def policy(self) -> Policy:
        """What runs."""
        return self.asked if self.decision is None else self.decision.policy

    @property
    def is_derived(self) -> bool:
        """Whether it goes on from what an approximation has left, and so is one."""
        beginning = None if self.known is None else self.known.beginning
        return beginning is not None and beginning.scope.chain != ""

    @property
    def left(self) -> list[Choice]:
        """Choices that are not complete."""
        return [choice for choice in self.choices if choice.ended is None]

    def advance(self) -> Prefilled | None:
        """One unit of work; the prompt once it is in place, kept until its choices decode."""
        if self.work is None:
            raise RuntimeError("a request prefills and has no work")
        try:
            self.rows = next(self.work)
        except StopIteration as end:
            self.rows, self.work, self.prefilled = 0, None, end.value
        return self.prefilled

    def close(self) -> None:
        """Let go of all that was found, and of the ring of request and choices, at its end."""
        self.give_up_work()
        self.known = self.clock = None
        self.choices = []

    def give_up_work(self) -> None:
        """Let go of pages and of whatever is half done; what was found stays."""
        if self.work is not None:
            self.work.close()
        self.work = self.prefilled = None
