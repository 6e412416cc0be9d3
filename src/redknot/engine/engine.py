"""The engine: requests in, tokens out, one turn at a time; nothing here knows of processes."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from redknot.engine.background import Background
from redknot.engine.company import Company
from redknot.engine.counters import Counters
from redknot.engine.faults import FAULTS, told
from redknot.engine.intake import Intake, refused
from redknot.engine.messages import Cancel, Ended, Output, Prefilled, Produced, Refused, Submit
from redknot.engine.opening import Opening
from redknot.engine.reports import count, queue_seconds, report
from redknot.engine.request import Choice, Request
from redknot.engine.sampling import NoToken, Picked, pick_all
from redknot.engine.scheduler import Memory, NeverFits, Phase, QueueFull, Scheduler, Turn, spend
from redknot.engine.step_clock import StepClock
from redknot.errors import InputError
from redknot.execution import executor as execution
from redknot.execution.beginnings import Scope
from redknot.execution.session import Session
from redknot.segpaged import OutOfPages

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Outbox:
    """What a turn gives."""

    prefilled: list[Prefilled] = field(default_factory=list)
    produced: list[Produced] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)

    def output(self) -> Output | None:
        """A message, if there is anything to tell."""
        if not (self.prefilled or self.produced or self.ended):
            return None
        return Output(
            prefilled=tuple(self.prefilled),
            produced=tuple(self.produced),
            ended=tuple(self.ended),
        )


@dataclass(eq=False)
class Engine:
    """Many requests on one device. Not thread-safe."""

    session: Session
    intake: Intake
    opening: Opening
    scheduler: Scheduler
    company: Company
    background: Background
    counters: Counters
    alive: Callable[[], None] = lambda: None
    "Called between units of work, so that long turns show signs of life."
    requests: dict[str, Request] = field(default_factory=dict)
    draining: bool = False
    "Nothing new is taken."
    _out: Outbox = field(default_factory=Outbox)

    def submit(self, submit: Submit) -> Refused | None:
        """Take in a request, or say why not."""
        try:
            if self.draining:
                return self._refuse(submit, 503, "shutting_down", "the server is shutting down")
            request = self.intake.request(submit)
            self.scheduler.add(self.intake.job(request))
        except QueueFull as error:
            return self._refuse(submit, 429, "queue_full", f"{error}; try again later")
        except NeverFits as error:
            return self._refuse(submit, 400, "too_large", f"the request {error}")
        except InputError as error:
            self.counters.add("refused")
            return refused(submit, error)
        self.requests[request.request_id] = request
        return None

    def cancel(self, cancel: Cancel) -> None:
        """Stop a request or one of its choices; the pages are free when this returns."""
        request_id, number = cancel.request_id, cancel.choice
        request = self.requests.get(request_id)
        if request is None:
            return
        for choice in request.left:
            if number is None or choice.number == number:
                ended = Ended(request_id=request_id, choice=choice.number, reason=cancel.reason)
                self._end(choice, ended)

    def turn(self) -> Output | None:
        """One turn of whoever is next; None if nothing came of it."""
        clock = StepClock()
        turn = self.scheduler.turn(self._memory())
        for job_id in turn.preempt:
            self._preempt(job_id)
        for job_id in turn.admit:
            self._admit(job_id)
        with clock.model():
            spend(turn.prefill, turn.budget_ms, self._advance)
        if turn.decode and self._may_grow():
            self._decode(clock)
        if self._is_idle(turn):
            self.background.when_idle()
        elif turn.prefill or turn.decode:
            self._count(clock)
        output, self._out = self._out.output(), Outbox()
        return output

    @property
    def is_idle(self) -> bool:
        """Whether nothing at all is to do."""
        return not self.scheduler.jobs and not self.background.has_work

    def check(self) -> None:
        """Raise unless pages add up; for an idle engine, that none is left with requests."""
        self.session.executor.storage.pool.check()
        if not self.requests and (len(self.company) or self.held_pages()):
            raise RuntimeError("pages are held and no request is there")

    def held_pages(self) -> int:
        """Pages that would be free without requests."""
        return sum(self._held(request) for request in self.requests.values())

    def _is_idle(self, turn: Turn) -> bool:
        return turn.is_idle and not self.scheduler.jobs

    def _memory(self) -> Memory:
        """Pages now, and what the next tokens need."""
        for request in self.requests.values():
            job = self.scheduler.jobs[request.request_id]
            if job.phase is Phase.DECODE:
                job.growth = sum(self.company.growth(choice) for choice in request.left)
        pool = self.session.executor.storage.pool
        jobs = self.scheduler.jobs.values()
        wanted = sum(job.growth for job in jobs)
        wanted += max((job.pages for job in jobs if job.phase is Phase.WAITING), default=0)
        if pool.num_free < wanted:
            self.background.give_way()
        if pool.num_free >= wanted:
            return Memory(pool.num_free)
        for request in self.requests.values():
            self.scheduler.jobs[request.request_id].held = self._held(request)
        return Memory(pool.num_free, self.session.beginnings.reclaimable())

    def _may_grow(self) -> bool:
        """Whether there are pages for the next tokens, also of those who have just joined.

        If not, the next turn makes room, unless nobody else could give way.
        """
        pool, most = self.session.executor.storage.pool, 0
        for prefilled in self.company.prefilled():
            most += prefilled.cache.num_rows
        if pool.num_free >= most:
            return True
        memory, jobs = self._memory(), self.scheduler.jobs.values()
        holders = sum(job.phase is not Phase.WAITING for job in jobs)
        return holders <= 1 or sum(job.growth for job in jobs) <= memory.available

    def _held(self, request: Request) -> int:
        job = self.scheduler.jobs[request.request_id]
        if job.phase is Phase.DECODE:
            return self.company.own_pages(request.left)
        return job.pages if request.work is not None else 0

    def _admit(self, job_id: str) -> None:
        request = self.requests.get(job_id)
        if request is None:  # a task, whose work is there from the start
            return
        try:
            self.opening.begin(request, self.background.fallback)
        except FAULTS as error:
            self._fail(request, error)
            return
        self._advance_request(request)  # which takes its pages

    def _preempt(self, job_id: str) -> None:
        request = self.requests.get(job_id)
        if request is None:
            self.background.restart(job_id)
            return
        self._let_go(request)
        self._comes_back(request)

    def _comes_back(self, request: Request, missing: int = 0) -> None:
        """Admit it again once there is room for all that it had, and for what was missing."""
        job = self.scheduler.jobs[request.request_id]
        pages = max(job.pages, self.intake.pages_again(request)) + missing
        job.pages = min(pages, self.scheduler.limits.num_pages)
        self.counters.add("preemptions")

    def _let_go(self, request: Request) -> None:
        """Give back all its pages."""
        for choice in request.left:
            prefilled = self.company.remove(choice)
            if prefilled is not None:
                prefilled.cache.release()
        request.give_up_work()

    def _advance(self, job_id: str) -> float | None:
        """One unit of prefill; its milliseconds, None if there is no more."""
        self.alive()
        job = self.scheduler.jobs.get(job_id)
        if job is None or job.phase is not Phase.PREFILL:
            return None
        start = time.perf_counter()
        request = self.requests.get(job_id)
        if request is None:
            self.background.advance(job_id)
        else:
            self._advance_request(request)
        spent = 1e3 * (time.perf_counter() - start)
        if request is not None:
            spent = self.intake.pace(spent, request.rows)
        job.ms = max(0.0, job.ms - spent)
        return spent

    def _advance_request(self, request: Request) -> None:
        try:
            if request.advance() is not None:
                self._prefilled(request)
        except OutOfPages as short:
            self._no_room(request, short)
        except FAULTS as error:
            self._fail(request, error)

    def _no_room(self, request: Request, short: OutOfPages) -> None:
        """Pages were counted too low, or others have them: wait, unless nobody else has any."""
        told(short)
        self._let_go(request)
        others = [job for job in self.scheduler.jobs.values() if job.phase is not Phase.WAITING]
        if len(others) > 1:
            self.scheduler.requeue(request.request_id)
            self._comes_back(request, missing=short.asked - short.free)
        else:
            self._fail(request, short)

    def _fail(self, request: Request, error: Exception) -> None:
        """End what went wrong, and only that."""
        log.exception("request %s failed", request.request_id)
        line = told(error)
        request.give_up_work()
        for choice in request.left:
            self._end(
                choice,
                Ended(
                    request_id=request.request_id,
                    choice=choice.number,
                    reason="error",
                    message=line,
                ),
            )

    def _prefilled(self, request: Request) -> None:
        """The prompt is in place: keep what others may share, choose first tokens, decode."""
        prefilled = request.prefilled
        if prefilled is None:
            raise RuntimeError("a prompt that is not in place")
        left = request.left
        again = bool(left[0].tokens)
        if not request.submit.exact and not request.is_derived:
            self.session.remember(prefilled, len(prefilled.token_ids), request.submit.salt)
        copies = [prefilled, *(prefilled.fork() for _ in left[1:])]
        if not again:
            self._first_tokens(request, prefilled, left)
        for choice, copy in zip(left, copies, strict=True):
            if choice.ended:
                copy.cache.release()
            elif again:
                self.company.resume(choice, copy, self.alive)
            else:
                self.company.add(choice, copy)
        self.scheduler.jobs[request.request_id].phase = Phase.DECODE
        request.prefilled = None
        if not request.left:
            self._finish(request)

    def _first_tokens(
        self, request: Request, prefilled: execution.Prefilled, choices: list[Choice]
    ) -> None:
        pickers = [choice.picker for choice in choices]
        logits = prefilled.logits[None].expand(len(pickers), -1)
        picked = pick_all(pickers, logits)
        done = report(self.session, request, prefilled)
        done.seconds["queue"] = max(0.0, queue_seconds(request) - sum(done.seconds.values()))
        exact_tokens = 0 if request.is_derived else prefilled.layout.exact
        count(self.counters, done, None if request.submit.exact else exact_tokens)
        self.background.saw(request, done)
        self._out.prefilled.append(Prefilled(request_id=request.request_id, report=done))
        for choice, one in zip(choices, picked, strict=True):
            self._take(choice, one)

    def _decode(self, clock: StepClock) -> None:
        try:
            found = self.company.step(clock)
        except FAULTS as error:  # a device error: nobody's tokens are sound
            for request in list(self.requests.values()):
                if self.scheduler.jobs[request.request_id].phase is Phase.DECODE:
                    self._fail(request, error)
            return
        for choice, one in found:
            self._take(choice, one)

    def _take(self, choice: Choice, picked: Picked) -> None:
        """One more token of ``choice``; the last one takes it out."""
        request_id, number = choice.request.request_id, choice.number
        if isinstance(picked, NoToken):
            self._end(choice, Ended(
                request_id=request_id, choice=number, reason="error", message=picked.message
            ))  # fmt: skip
            return
        choice.tokens.append(picked.token_id)
        self.counters.add("generation_tokens")
        self._out.produced.append(Produced(request_id=request_id, choice=number, tokens=(picked,)))
        ended = choice.end()
        if ended is not None:
            self._end(choice, ended)

    def _end(self, choice: Choice, ended: Ended) -> None:
        choice.ended = ended
        self.counters.add(f"requests.{ended.reason}")
        self._out.ended.append(ended)
        request = choice.request
        prefilled = self.company.remove(choice)
        if prefilled is not None:
            if ended.reason in ("stop", "length", "cancelled"):
                try:
                    self._keep(choice, prefilled)
                except FAULTS as error:  # a device without memory; the answer is whole
                    log.warning("the pages of an answer are not kept: %s", told(error))
            prefilled.cache.release()
        if request.prefilled is not None:  # its first tokens are being chosen
            return
        if request.left:
            self.scheduler.jobs[request.request_id].choices = len(request.left)
        else:
            self._finish(request)

    def _keep(self, choice: Choice, prefilled: execution.Prefilled) -> None:
        """The pages of prompt and answer, for the next turn of the same chat."""
        request, whole = choice.request, prefilled.sight.hides
        chain = self.opening.chain(request.policy)
        if request.submit.exact or (whole and not chain):  # no dense prompt goes on from a window
            return
        if chain and not request.policy.takes_exact:
            return
        cache = prefilled.cache.fork()
        written = torch.tensor(choice.tokens[: cache.length - len(request.prompt)])
        token_ids = torch.cat([request.prompt.token_ids, written.to(torch.int64)])
        scope = Scope(request.submit.salt, chain)
        least = (len(token_ids) if whole else len(request.prompt)) if chain else 1
        self.session.beginnings.put(token_ids, cache, scope, least)

    def _finish(self, request: Request) -> None:
        self.scheduler.remove(request.request_id)
        del self.requests[request.request_id]
        self.background.finished(request)
        request.close()

    def _refuse(self, submit: Submit, status: int, code: str, message: str) -> Refused:
        self.counters.add("refused")
        return Refused(
            request_id=submit.request_id,
            status=status,  # type: ignore[arg-type]
            code=code,
            message=message,
        )

    def _count(self, clock: StepClock) -> None:
        self.counters.add("steps")
        self.counters.add("step_seconds", clock.seconds)
        self.counters.add("model_seconds", clock.model_seconds)
        self.counters.add("sampling_seconds", clock.sampling_seconds)
