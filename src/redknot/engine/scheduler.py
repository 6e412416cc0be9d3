"""Who runs next, and who must give way? Decisions over numbers, without tensors or clocks.

One turn is: give way (preempt), admit, prefill for a budget of predicted milliseconds, then one
token for everybody who decodes. Whoever prefills can be left behind any layer and taken up again,
so nobody is bound to a batch; requests join and leave those who decode between turns.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum

PATIENCE = 4.0
"""How many times its own work a request may be overtaken for. In a simulated queue of short (20 ms)
and long (400 ms) prompts 3:1 the short ones wait a third of what they wait first come first served,
and the longest wait of all grows by 4 to 8 %."""


class QueueFull(RuntimeError):
    """As many requests wait as may."""


class NeverFits(ValueError):
    """A request needs more than there is, even alone."""


class Phase(StrEnum):
    """Where a request stands."""

    WAITING = "waiting"
    PREFILL = "prefill"  # load, probe and recover
    DECODE = "decode"


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What there is."""

    num_pages: int
    max_requests: int = 32
    "Choices that decode together."
    max_waiting: int = 256
    max_prefilling: int = 8
    "Prompts that have pages before they decode; besides them at most one task."
    step_ms: float = 60.0
    "Predicted prefill work of one turn."


@dataclass(eq=False, slots=True)
class Job:
    """What the scheduler knows of a request, and the engine keeps up to date."""

    job_id: str
    arrived: float
    "Seconds on some clock."
    pages: int
    "Needed at most until it decodes."
    last_pages: int
    "Needed at most when its last token comes."
    ms: float
    "Predicted milliseconds of prefill that are left."
    choices: int = 1
    "Slots among those who decode; 0 for work that only prefills."
    phase: Phase = Phase.WAITING
    held: int = 0
    "Pages it has."
    growth: int = 0
    "Pages that the next token of its choices needs."
    preempted: int = 0
    whole_ms: float = field(init=False)
    "Predicted milliseconds of all its prefill."

    def __post_init__(self) -> None:
        self.whole_ms = self.ms

    @property
    def is_task(self) -> bool:
        """Whether nobody waits for tokens of it."""
        return not self.choices

    @property
    def due(self) -> float:
        """Arrival, and patience that grows with the work: short ones overtake, nobody starves."""
        return self.arrived + PATIENCE * self.ms / 1e3


@dataclass(frozen=True, slots=True)
class Memory:
    """Pages now."""

    free: int
    reclaimable: int = 0
    "Kept for later prompts, given back when asked for."

    @property
    def available(self) -> int:
        """What can be had without anybody giving way."""
        return self.free + self.reclaimable


@dataclass(frozen=True, slots=True)
class Turn:
    """What to do now, in this order."""

    preempt: tuple[str, ...] = ()
    "Give back all pages and wait again."
    admit: tuple[str, ...] = ()
    "Begin to prefill."
    prefill: tuple[str, ...] = ()
    "In this order, until ``budget_ms`` is used up; the first of them for one layer at least."
    budget_ms: float = 0.0
    decode: tuple[str, ...] = ()
    "One token each."

    @property
    def is_idle(self) -> bool:
        """Whether nobody wants anything."""
        return not (self.preempt or self.prefill or self.decode)


@dataclass(eq=False)
class Scheduler:
    """All requests that are not done."""

    limits: Limits
    jobs: dict[str, Job] = field(default_factory=dict)

    def add(self, job: Job) -> None:
        """Take in a request; `NeverFits` and `QueueFull` refuse it at once."""
        most = max(job.pages, job.last_pages)
        if most > self.limits.num_pages:
            raise NeverFits(f"needs {most} pages of K/V, and there are {self.limits.num_pages}")
        if job.choices > self.limits.max_requests:
            raise NeverFits(
                f"asks for {job.choices} choices, and {self.limits.max_requests} decode together"
            )
        if len(self._in(Phase.WAITING)) >= self.limits.max_waiting:
            raise QueueFull(f"{self.limits.max_waiting} requests wait already")
        self.jobs[job.job_id] = job

    def remove(self, job_id: str) -> Job:
        """Forget a request that is done, was cancelled or has failed."""
        return self.jobs.pop(job_id)

    def requeue(self, job_id: str) -> None:
        """Back to those who wait: its pages are given back, and its work is to be done again.

        It comes back once there is room for what it had and what it was stopped for, so that it
        gets further than before.
        """
        job = self.jobs[job_id]
        job.pages = max(job.pages, min(job.held + job.growth, job.last_pages))
        job.phase, job.held, job.growth, job.ms = Phase.WAITING, 0, 0, job.whole_ms

    def turn(self, memory: Memory) -> Turn:
        """Decide the next turn, and move those who are preempted or admitted."""
        available, preempted = self._make_room(memory.available)
        admitted = self._admit(available) if not preempted else []
        prefilling = sorted(self._in(Phase.PREFILL), key=_by_due)
        return Turn(
            preempt=_ids(preempted),
            admit=_ids(admitted),
            prefill=_ids(prefilling),
            budget_ms=self.limits.step_ms if prefilling else 0.0,
            decode=_ids(self._in(Phase.DECODE)),
        )

    def counts(self) -> dict[Phase, int]:
        """Requests by phase; tasks are none."""
        return {phase: sum(not job.is_task for job in self._in(phase)) for phase in Phase}

    def _make_room(self, available: int) -> tuple[int, list[Job]]:
        """Preempt the latest until the others can grow; the earliest never gives way."""
        preempted: list[Job] = []
        while True:
            needed = sum(job.growth for job in self._in(Phase.DECODE))
            if needed <= available:
                return available - needed, preempted
            holders = [job for job in self.jobs.values() if job.phase is not Phase.WAITING]
            if len(holders) <= 1:
                return 0, preempted
            victim = max(holders, key=lambda job: (job.arrived, job.job_id))
            available += victim.held
            victim.preempted += 1
            self.requeue(victim.job_id)
            preempted.append(victim)

    def _admit(self, available: int) -> list[Job]:
        """Those that are due first, as long as each fits; a large one is not overtaken for ever.

        The first that does not fit stops later arrivals, not shorter ones that came before it.
        """
        slots = self.limits.max_requests - sum(
            job.choices for job in self.jobs.values() if job.phase is not Phase.WAITING
        )
        prefilling = self._in(Phase.PREFILL)
        task_runs = any(job.is_task for job in prefilling)
        room = self.limits.max_prefilling - sum(not job.is_task for job in prefilling)
        admitted: list[Job] = []
        for job in sorted(self._in(Phase.WAITING), key=_by_due):
            if job.is_task and task_runs:
                continue
            if (not job.is_task and not room) or job.choices > slots or job.pages > available:
                break
            job.phase, job.held = Phase.PREFILL, job.pages
            available -= job.pages
            slots -= job.choices
            room -= not job.is_task
            task_runs |= job.is_task
            admitted.append(job)
        return admitted

    def _in(self, phase: Phase) -> list[Job]:
        return [job for job in self.jobs.values() if job.phase is phase]


def spend(order: Iterable[str], budget_ms: float, work: Callable[[str], float | None]) -> None:
    """Let those of ``order`` work until the budget is used up, one layer at least.

    ``work`` does one unit and returns its milliseconds, or None once there is nothing left.
    """
    spent = 0.0
    for job_id in order:
        while spent < budget_ms or spent == 0.0:
            took = work(job_id)
            if took is None:
                break
            spent += max(took, 1e-6)
        if spent >= budget_ms:
            return


def _by_due(job: Job) -> tuple[float, float, str]:
    return job.due, job.arrived, job.job_id


def _ids(jobs: Iterable[Job]) -> tuple[str, ...]:
    return tuple(job.job_id for job in jobs)
