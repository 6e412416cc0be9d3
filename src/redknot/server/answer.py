"""What the engine says about the jobs of one HTTP request, as it comes."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Coroutine
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

from fastapi import Request

from redknot.engine.client import Event
from redknot.engine.messages import Ended, Prefilled, Produced, Report
from redknot.server.choice import Choice, Finished, Job, Piece
from redknot.server.errors import ApiError
from redknot.server.logs import Trace
from redknot.server.service import Service

Update = Report | Piece | Finished
Item = tuple[int, Update | BaseException | None]
T = TypeVar("T")


class Answer:
    """Runs jobs beside each other. `close` stops whatever of them still runs."""

    def __init__(self, service: Service, jobs: list[Job], trace: Trace) -> None:
        self.jobs, self._service, self._trace = jobs, service, trace
        self._queue: asyncio.Queue[Item] = asyncio.Queue()
        self._backlog: deque[Item] = deque()
        self._tasks: list[asyncio.Task[None]] = []

    async def begin(self) -> None:
        """Start all jobs and wait for a first word of each; a refusal is raised here."""
        for index, job in enumerate(self.jobs):
            task = self._service.spawn(self._pump(index, job))
            task.add_done_callback(partial(self._ended, index))
            self._tasks.append(task)
        silent = set(range(len(self.jobs)))
        try:
            while silent:
                item = await self._queue.get()
                self._backlog.append(item)
                if isinstance(item[1], BaseException):
                    raise item[1]
                silent.discard(item[0])
        finally:
            if silent:  # refused, or the client has left
                self.close()

    def close(self) -> None:
        """Stop the jobs; the engine is told by their tasks."""
        for task in self._tasks:
            task.cancel()

    async def updates(self) -> AsyncIterator[tuple[int, Update]]:
        """Everything that happens, with the index of its job."""
        left = len(self.jobs)
        while left:
            index, update = self._backlog.popleft() if self._backlog else await self._queue.get()
            if isinstance(update, BaseException):
                raise update
            if update is None:
                left -= 1
            else:
                yield index, update

    def _ended(self, index: int, task: "asyncio.Task[None]") -> None:
        if not task.cancelled():
            self._queue.put_nowait((index, task.exception()))

    async def _pump(self, index: int, job: Job) -> None:
        service, request = self._service, job.request
        choices = [
            Choice(job, at, service.tokenizer, service.ends | {*request.sampling.stop_token_ids})
            for at in range(request.sampling.n)
        ]
        watch = _Watch(service, self._trace)
        async with aclosing(service.client.submit(request)) as events:
            async for event in events:
                watch.see(event)
                for update in _updates(event, choices):
                    self._queue.put_nowait((index, update))
                    watch.note(update)
                if isinstance(event, Produced) and choices[event.choice].done:
                    await service.client.stop(request.request_id, event.choice)
                if all(choice.done for choice in choices):
                    break


def _updates(event: Event, choices: list[Choice]) -> list[Update]:
    if isinstance(event, Prefilled):
        return [event.report]
    choice = choices[event.choice]
    if choice.done:  # the engine did not know yet
        return []
    if isinstance(event, Produced):
        return list(choice.add(event.tokens))
    if event.reason == "error":
        raise ApiError(500, event.message or "the engine failed", code="generation_failed")
    if event.reason == "cancelled":
        raise ApiError(503, event.message or "the engine stopped the request", code="cancelled")
    return list(choice.end(event))


class _Watch:
    """Times one job, for the metrics and the log line."""

    def __init__(self, service: Service, trace: Trace) -> None:
        self._metrics, self._trace = service.metrics, trace
        self._last: dict[int, float] = {}

    def see(self, event: Event) -> None:
        """Note when tokens come."""
        if isinstance(event, Ended):
            return
        now = time.monotonic()
        if isinstance(event, Prefilled):
            report = event.report
            self._trace.policy = report.policy
            self._trace.cached_tokens += report.cached_tokens
            self._metrics.prefilled(report)
        elif event.tokens:
            if not self._last and self._trace.ttft is None:
                self._trace.ttft = now - self._trace.started
            if not self._last:
                self._metrics.first_token(now - self._trace.started)
            if event.choice in self._last:
                gap = (now - self._last[event.choice]) / len(event.tokens)
                self._metrics.tokens(gap, len(event.tokens))
            self._last[event.choice] = now

    def note(self, update: Update) -> None:
        """Note what is complete."""
        if isinstance(update, Finished):
            self._trace.completion_tokens += update.num_tokens
            self._metrics.finished(update.reason, time.monotonic() - self._trace.started)


async def unless_left(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What ``work`` gives; it is cancelled as soon as the client has left."""
    task, left = asyncio.create_task(work), asyncio.create_task(_left(request))
    try:
        await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ApiError(499, "the client has left")
    finally:
        task.cancel()
        left.cancel()


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
