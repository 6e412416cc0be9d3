"""A simulated engine: a clock, a pool that counts pages, and the scheduler under test."""

from collections.abc import Callable
from dataclasses import dataclass, field

from redknot.engine.scheduler import (
    Job,
    Limits,
    Memory,
    NeverFits,
    Phase,
    QueueFull,
    Scheduler,
    Turn,
    spend,
)

PAGE_SIZE = 4
NEVER = float("inf")


@dataclass(frozen=True, kw_only=True)
class Load:
    """A request as the world knows it; the scheduler is told less, and not always the truth."""

    name: str
    arrived: float
    prompt: int = PAGE_SIZE
    units: tuple[float, ...] = (10.0,)
    "Real milliseconds of each unit of prefill."
    predicted: float | None = None
    "Milliseconds that the scheduler is told; None is the truth."
    choices: int = 1
    tokens: int = 1
    "Of each choice, the first one included; 0 for a task."
    most_tokens: int = 0
    "What it may ask for; never less than ``tokens``."
    cancelled: float = NEVER

    @property
    def ms(self) -> float:
        """Real milliseconds of its prefill."""
        return sum(self.units)

    def held(self, length: int) -> int:
        """Pages of all its choices at ``length`` tokens; full ones of the prompt are shared."""
        if length <= self.prompt:
            return -(-self.prompt // PAGE_SIZE)
        shared = self.prompt // PAGE_SIZE
        return shared + self.choices * (-(-length // PAGE_SIZE) - shared)

    def job(self) -> Job:
        """What the scheduler is told."""
        last = self.prompt + max(self.tokens, self.most_tokens) - 1  # the last one is not written
        told = self.ms if self.predicted is None else self.predicted
        pages = self.held(self.prompt), self.held(last)
        return Job(self.name, self.arrived, *pages, told, choices=self.choices)


@dataclass(eq=False)
class Record:
    """What became of a request; times in seconds."""

    load: Load
    submitted: float
    outcome: str = ""
    "finished, cancelled, full or never."
    first: float = NEVER
    finished: float = NEVER
    preempted: int = 0
    next_unit: int = 0
    produced: int = 0
    token_turns: list[int] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        """Seconds from arrival to the first token."""
        return self.first - self.load.arrived


Watch = Callable[["Simulation", Turn], None]


@dataclass(eq=False)
class Simulation:
    """Runs ``loads`` to their end. As the engine does, it takes messages between turns only."""

    limits: Limits
    loads: list[Load]
    decode_ms: float = 5.0
    keeps: bool = False
    "Whether pages of what is finished stay until others need them."
    watch: Watch = lambda simulation, turn: None
    "Called once a turn is decided, before anything of it is done."
    on_submit: Callable[["Simulation", Record], None] = lambda simulation, record: None
    now: float = 0.0
    busy_ms: float = 0.0
    wasted_ms: float = 0.0
    "Prefill work that was given up."
    records: dict[str, Record] = field(default_factory=dict)
    turn_ms: list[tuple[float, float]] = field(default_factory=list)
    "Of each turn: prefill, decode."
    kept: int = 0
    free: int = field(init=False)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.limits)
        self.free = self.limits.num_pages
        self._coming = sorted(self.loads, key=lambda load: load.arrived)
        self._held: dict[str, int] = {}

    @property
    def held(self) -> dict[str, int]:
        """Pages by request."""
        return dict(self._held)

    def run(self, most_turns: int = 200_000) -> "Simulation":
        """Until nobody is left."""
        while self._coming or self.scheduler.jobs:
            if not self.scheduler.jobs:
                self.now = max(self.now, self._coming[0].arrived)
            self._messages()
            if self.scheduler.jobs:
                self.turn()
            if len(self.turn_ms) > most_turns:
                raise AssertionError(f"no end after {most_turns} turns")
        return self

    def turn(self) -> None:
        """One turn, as `Engine.turn` takes it."""
        jobs = self.scheduler.jobs
        for job in jobs.values():
            if job.phase is Phase.DECODE:
                record = self.records[job.job_id]
                length = record.load.prompt + max(0, record.produced - 1)
                job.held = self._held[job.job_id]
                job.growth = max(0, record.load.held(length + 1) - job.held)
        turn = self.scheduler.turn(Memory(self.free, self.kept))
        self.watch(self, turn)
        if turn.is_idle:
            raise AssertionError("requests are there and the scheduler does nothing")
        for name in turn.preempt:
            self._give_up(name)
            self.records[name].preempted += 1
        for name in turn.admit:
            self._take(name, jobs[name].pages)
        before = self.busy_ms
        spend(turn.prefill, turn.budget_ms, self._advance)
        prefilled = self.busy_ms - before
        if turn.decode:
            self._spend(self.decode_ms)
            for name in turn.decode:
                self._decode(name)
        self.turn_ms.append((prefilled, self.decode_ms if turn.decode else 0.0))

    def _messages(self) -> None:
        while self._coming and self._coming[0].arrived <= self.now:
            self._submit(self._coming.pop(0))
        for name in list(self.scheduler.jobs):
            if self.records[name].load.cancelled <= self.now:
                self._end(name, "cancelled")

    def _submit(self, load: Load) -> None:
        record = self.records[load.name] = Record(load, self.now)
        try:
            self.scheduler.add(load.job())
        except QueueFull:
            record.outcome = "full"
        except NeverFits:
            record.outcome = "never"
        else:
            self.on_submit(self, record)

    def _advance(self, name: str) -> float | None:
        job = self.scheduler.jobs.get(name)
        if job is None or job.phase is not Phase.PREFILL:
            return None
        record = self.records[name]
        took = record.load.units[record.next_unit]
        record.next_unit += 1
        self._spend(took)
        job.ms = max(0.0, job.ms - took)
        if record.next_unit == len(record.load.units):
            self._prefilled(job, record)
        return took

    def _prefilled(self, job: Job, record: Record) -> None:
        if not record.load.tokens:
            self._end(job.job_id, "finished")
            return
        written = record.load.prompt + max(0, record.produced - 1)
        more = record.load.held(written) - self._held[job.job_id]
        self._take(job.job_id, more)
        job.phase = Phase.DECODE
        if not record.produced:
            self._token(record)

    def _decode(self, name: str) -> None:
        record = self.records[name]
        written = record.load.prompt + record.produced
        self._take(name, record.load.held(written) - self._held[name])
        self._token(record)

    def _token(self, record: Record) -> None:
        record.produced += 1
        record.token_turns.append(len(self.turn_ms))
        record.first = min(record.first, self.now)
        if record.produced == record.load.tokens:
            self._end(record.load.name, "finished")

    def _end(self, name: str, outcome: str) -> None:
        pages = self._held.get(name, 0)
        self._give_up(name)
        self.scheduler.remove(name)
        record = self.records[name]
        record.outcome, record.finished = outcome, self.now
        if self.keeps and outcome == "finished":
            self.free, self.kept = self.free - pages, self.kept + pages

    def _give_up(self, name: str) -> None:
        record = self.records[name]
        if record.outcome == "" and record.produced < record.load.tokens:
            self.wasted_ms += sum(record.load.units[: record.next_unit])
        record.next_unit = 0
        self.free += self._held.pop(name, 0)

    def _take(self, name: str, pages: int) -> None:
        """Charge the pool; what is kept is given back first come."""
        reclaimed = min(self.kept, max(0, pages - self.free))
        self.kept -= reclaimed
        self.free += reclaimed - pages
        self._held[name] = self._held.get(name, 0) + pages
        self.check_pages()

    def check_pages(self) -> None:
        """Pages add up, and none is given out twice."""
        if self.free < 0 or min(self._held.values(), default=0) < 0:
            raise AssertionError(f"{-self.free} pages more than there are: {self._held}")
        if self.free + self.kept + sum(self._held.values()) != self.limits.num_pages:
            raise AssertionError("pages do not add up")

    def _spend(self, ms: float) -> None:
        self.now += ms / 1e3
        self.busy_ms += ms
