"""What goes on besides requests: idle building, registered segments, shadow runs, the fallback."""

import logging
import time
from dataclasses import dataclass, field

import torch

from redknot.engine.catalogue import Catalogue
from redknot.engine.counters import Counters
from redknot.engine.faults import told
from redknot.engine.footprint import build_pages
from redknot.engine.intake import Intake
from redknot.engine.messages import (
    FromEngine,
    Refused,
    Report,
    SegmentAdd,
    SegmentDelete,
    SegmentQuery,
    Segments,
)
from redknot.engine.opening import UNCHANGED
from redknot.engine.request import Request
from redknot.engine.scheduler import Job, NeverFits, Phase, QueueFull, Scheduler
from redknot.engine.shadow import ShadowMonitor
from redknot.engine.tasks import IdleBuilder, ShadowSide, Task, building, shadow
from redknot.execution.session import Session
from redknot.execution.turns import Turns
from redknot.heads import HeadMap
from redknot.recovery import Windows
from redknot.recovery.policies import Dense
from redknot.segments import SegmentState
from redknot.segpaged import OutOfPages

log = logging.getLogger(__name__)

SHADOW_TOKENS = 32
"Tokens of an answer that a shadow run goes along."
SHADOW_DELAY = 5.0
"Seconds that a shadow run counts as younger than it is: requests go first."
MOST_SHADOWS = 8
"Shadow runs that wait."


@dataclass(eq=False)
class Background:
    """Tasks are scheduled as requests are; idle building only fills what they leave."""

    session: Session
    intake: Intake
    scheduler: Scheduler
    counters: Counters
    builder: IdleBuilder
    monitor: ShadowMonitor
    head_map: HeadMap | None
    build_idle: bool = True
    mail: list[FromEngine] = field(default_factory=list)
    "Answers that wait to be sent."
    _tasks: dict[str, Task] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.catalogue = Catalogue(self.session)

    @property
    def fallback(self) -> str:
        """Why dense answers; empty while the policy does."""
        return self.monitor.fallback

    @property
    def has_work(self) -> bool:
        """Whether idle time is of use."""
        return self.build_idle and len(self.builder) > 0

    def when_idle(self) -> None:
        """One layer of one segment that nobody waits for."""
        if self.build_idle:
            self.builder.work()

    def give_way(self) -> None:
        """Requests need pages: what is half built in idle time lets go of its own."""
        self.builder.give_way()

    def advance(self, task_id: str) -> None:
        """One unit of a task; one whose pages others have by now waits for them."""
        task = self._tasks[task_id]
        try:
            goes_on = task.advance()
        except OutOfPages as short:
            line, missing = told(short), short.asked - short.free
            task.restart()
            goes_on = self._waits(task_id, missing)
            if not goes_on:
                task.failed(line)
        if not goes_on:
            self.remove(task_id)

    def _waits(self, task_id: str, missing: int) -> bool:
        """Let a task wait for pages that it lacks; False where nobody else has any."""
        jobs, limits = self.scheduler.jobs, self.scheduler.limits
        if sum(job.phase is not Phase.WAITING for job in jobs.values()) < 2:
            return False
        self.scheduler.requeue(task_id)
        jobs[task_id].pages = min(jobs[task_id].pages + missing, limits.num_pages)
        return True

    def restart(self, task_id: str) -> None:
        """A task has given way: it begins again at its next turn."""
        self._tasks[task_id].restart()

    def remove(self, task_id: str) -> None:
        """Forget a task, done or not."""
        self._tasks.pop(task_id).work.close()
        self.scheduler.remove(task_id)

    def saw(self, request: Request, told: Report) -> None:
        """A prompt is in place: count what reuse saved, and note what would have been of use."""
        decision, known = request.decision, request.known
        if decision is not None and decision.predicted_dense and told.cached_tokens:
            spent = sum(s for stage, s in told.seconds.items() if stage not in ("queue", "wait"))
            self.counters.add("saved_seconds", decision.predicted_dense - spent)
        if known is None or request.submit.exact or not self.build_idle:
            return
        for outcome in known.outcomes:
            wanted = outcome.status == "new" and outcome.reason == "not stored"
            if wanted and self.session.may_store(len(outcome.span)):
                ids = request.prompt.token_ids[outcome.span.start : outcome.span.stop]
                self.builder.want(ids, request.submit.salt)

    def finished(self, request: Request) -> None:
        """Run a share of the requests in the shadow of their answers."""
        first, known = request.choices[0], request.known
        answer = first.tokens[:SHADOW_TOKENS]
        whole = first.ended is not None and first.ended.reason in ("stop", "length")
        if not whole or known is None:
            return
        asked, layout = request.asked, request.asked.view(known.layout)
        plain = asked.windows is Windows.NONE and not len(layout.stored)
        without_loss = request.submit.exact or asked in UNCHANGED or plain
        if not self.monitor.wants(without_loss=without_loss):
            return
        dense = ShadowSide(Dense(), known, None)
        other = ShadowSide(asked, known, self.head_map)
        spec = request.submit.sampling
        greedy = spec.temperature == 0 and spec.grammar is None
        answered_dense = request.policy in UNCHANGED
        sides = (other if answered_dense else dense,) if greedy else (dense, other)

        def start() -> Turns[object]:
            ids, tokens = request.prompt.token_ids, torch.tensor(answer)
            return shadow(self.session.executor, ids, tokens, sides)

        if sum(name.startswith("shadow-") for name in self._tasks) >= MOST_SHADOWS:
            self.counters.add("shadow_dropped")
            return
        job = self.intake.job(request)
        task = Task(f"shadow-{request.request_id}", start, self._shadowed, self._shadow_failed)
        try:
            self._schedule(task, job.pages, job.ms * len(sides), time.time() + SHADOW_DELAY)
        except (QueueFull, NeverFits):
            self.counters.add("shadow_dropped")

    def ask(self, asked: SegmentAdd | SegmentQuery | SegmentDelete) -> None:
        """Answer a question about segments, now or once a state is built."""
        if isinstance(asked, SegmentQuery):
            self.mail.append(self.catalogue.answer(asked.request_id, asked.salt, asked.keys))
        elif isinstance(asked, SegmentDelete):
            if self.catalogue.forget(asked.salt, asked.key):
                self.builder.forget(bytes.fromhex(asked.key))
                self._stop_building(asked.key)
                self.mail.append(Segments(request_id=asked.request_id))
            else:
                self._refuse(asked.request_id, 404, "not_found", "no such segment")
        else:
            self._add(asked)

    def _add(self, asked: SegmentAdd) -> None:
        anchor, limit = len(self.session.namespace.anchor), self.intake.context_length
        if not asked.token_ids or len(asked.token_ids) + anchor > limit:
            self._refuse(
                asked.request_id, 400, "context_length_exceeded",
                f"a segment has 1 to {limit - anchor} tokens, not {len(asked.token_ids)}",
            )  # fmt: skip
            return
        vocabulary = self.session.model.hf.config.vocab_size
        if min(asked.token_ids) < 0 or max(asked.token_ids) >= vocabulary:
            message = f"token ids lie between 0 and {vocabulary - 1}"
            self._refuse(asked.request_id, 400, "invalid_value", message)
            return
        ids = torch.tensor(asked.token_ids, dtype=torch.int64)
        if not self.session.may_store(len(ids)):
            message = f"the state of {len(ids)} tokens is larger than all that may be stored"
            self._refuse(asked.request_id, 400, "too_large", message)
            return
        key = self.session.key(ids, asked.salt).hex()

        def done(state: object) -> None:
            if not isinstance(state, SegmentState):
                raise TypeError("a build gave something else")
            info = self.catalogue.ready(asked.salt, key, state)
            self.mail.append(Segments(request_id=asked.request_id, segments=(info,)))

        def failed(line: str) -> None:
            self.catalogue.failed(asked.salt, key)
            self._refuse(asked.request_id, 503, "not_built", line)

        def start() -> Turns[object]:
            return building(self.session, self.counters, ids, asked.salt)

        stored = self.session.stored(ids, asked.salt)
        if stored is not None:
            done(stored)
            return
        self.builder.forget(bytes.fromhex(key))
        self.catalogue.building(asked.salt, key, len(ids))
        pages = build_pages(self.session.executor, len(ids) + anchor)
        task = Task(f"build-{key}-{asked.request_id}", start, done, failed)
        try:
            self._schedule(task, pages, self.intake.milliseconds(len(ids)), time.time())
        except (QueueFull, NeverFits) as error:
            self.catalogue.failed(asked.salt, key)
            self._not_taken(asked.request_id, error)

    def _not_taken(self, request_id: str, error: Exception) -> None:
        if isinstance(error, QueueFull):
            self._refuse(request_id, 429, "queue_full", f"{error}; try again later")
        else:
            self._refuse(request_id, 400, "too_large", f"the segment {error}")

    def _stop_building(self, key: str) -> None:
        """Whoever waits for it hears that it was deleted."""
        for task_id in [name for name in self._tasks if name.startswith(f"build-{key}")]:
            task = self._tasks[task_id]
            self.remove(task_id)
            task.failed("the segment was deleted meanwhile")

    def _schedule(self, task: Task, pages: int, ms: float, arrived: float) -> None:
        self.scheduler.add(Job(task.task_id, arrived, pages, pages, ms, choices=0))
        self._tasks[task.task_id] = task

    def _shadowed(self, agreement: object) -> None:
        value = float(agreement)  # type: ignore[arg-type]
        self.counters.add("shadow_runs")
        self.counters.add("shadow_agreement", value)
        before = self.monitor.fallbacks
        self.monitor.add(value)
        self.counters.add("fallbacks", self.monitor.fallbacks - before)
        while (message := self.monitor.transition()) is not None:
            log.warning("%s", message)

    def _shadow_failed(self, line: str) -> None:
        log.warning("a shadow run failed: %s", line)
        self.counters.add("shadow_dropped")

    def _refuse(self, request_id: str, status: int, code: str, message: str) -> None:
        refusal = Refused(
            request_id=request_id,
            status=status,  # type: ignore[arg-type]
            code=code,
            message=message,
        )
        self.mail.append(refusal)
