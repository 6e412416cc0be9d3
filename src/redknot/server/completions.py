"""/v1/completions."""

from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Body, Request, Response
from fastapi.responses import JSONResponse
from openai.types import Completion, CompletionChoice
from openai.types.completion_choice import Logprobs

from redknot.engine.client import new_request_id
from redknot.engine.messages import Report, TokenInfo
from redknot.server.answer import Answer, unless_left
from redknot.server.choice import Job, Piece
from redknot.server.errors import ApiError
from redknot.server.events import EventStream
from redknot.server.names import name
from redknot.server.outcome import Totals, Whole, gather
from redknot.server.schema.completion import CompletionRequest
from redknot.server.service import Service
from redknot.server.strict import StrictRoute

BEHIND = 8
"Tokens of a prompt that decide how the text behind it is written."
router = APIRouter(route_class=StrictRoute)


@router.post("/v1/completions", response_model=None, tags=["OpenAI"])
async def create_completion(
    request: Request, body: Annotated[CompletionRequest, Body()]
) -> Response:
    """Continue a text, or several."""
    service: Service = request.app.state.service
    service.check_model(body.model)
    _check(body)
    jobs = [await _job(service, body, prompt, request) for prompt in body.prompts]
    answer = Answer(service, jobs, request.state.trace)
    reply = _Reply(service, body, answer)
    if body.stream:
        await unless_left(request, answer.begin())
        return EventStream(answer, reply.chunks())
    whole = await unless_left(request, gather(answer, reply.totals))
    return JSONResponse(reply.whole(whole))


def _check(body: CompletionRequest) -> None:
    """What no field shows by itself."""
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise ApiError(400, "best_of is not supported, except as n", param="best_of")
    if body.echo and body.logprobs is not None:
        raise ApiError(400, "echo is not supported together with logprobs", param="echo")
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream", param="stream_options")


async def _job(
    service: Service, body: CompletionRequest, text: str | list[int], request: Request
) -> Job:
    tenant, trace = request.state.tenant, request.state.trace
    if not isinstance(text, str):
        service.check_ids(text, "prompt")
    prompt = await service.off_loop(
        service.renderer.completion,
        text,
        question="auto" if body.redknot is None else body.redknot.question,
    )
    submit = service.submit(
        body,
        prompt,
        trace,
        request_id=new_request_id(),
        salt=tenant.salt,
        max_tokens=service.room(prompt, body.max_tokens, "prompt", body.n),
        logprobs=body.logprobs,
    )
    return Job(request=submit, stop=body.stops, behind=tuple(submit.token_ids[-BEHIND:]))


class _Reply:
    """The answer to one request, whole or in chunks."""

    def __init__(self, service: Service, body: CompletionRequest, answer: Answer) -> None:
        self._service, self._body, self._answer = service, body, answer
        self.totals = Totals.of(answer)
        self._head: dict[str, Any] = {
            "id": f"cmpl-{answer.jobs[0].request.request_id}",
            "object": "text_completion",
            "created": self.totals.created,
            "model": service.model,
        }

    def whole(self, choices: dict[tuple[int, int], Whole]) -> dict[str, Any]:
        """The body of a plain answer."""
        made = [
            CompletionChoice(
                index=self._index(job, index),
                text=self._echo(job) + whole.text,
                finish_reason="length" if whole.reason == "length" else "stop",
                logprobs=self._logprobs(whole.logprobs),
            )
            for (job, index), whole in choices.items()
        ]
        completion = Completion(
            **self._head,
            choices=made,
            usage=self.totals.usage(),
            **self.totals.extra(self._body),
        )
        return completion.model_dump(mode="json", exclude_unset=True)

    async def chunks(self) -> AsyncIterator[Completion]:
        """The same in pieces."""
        n, left = self._body.n or 1, len(self._answer.jobs) * (self._body.n or 1)
        if self._body.echo:
            for job in range(len(self._answer.jobs)):
                for index in range(n):
                    yield self._chunk(job, index, self._echo(job))
        async for job, update in self._answer.updates():
            self.totals.add(job, update)
            if isinstance(update, Report):
                continue
            if isinstance(update, Piece):
                logprobs = self._logprobs(update.logprobs)
                yield self._chunk(job, update.choice, str(update.content), logprobs=logprobs)
                continue
            left -= 1
            extra = {} if left else self.totals.extra(self._body)
            yield self._chunk(job, update.choice, "", reason=update.reason, **extra)
        if self._body.wants_usage:
            yield Completion(**self._head, choices=[], usage=self.totals.usage())

    def _chunk(
        self,
        job: int,
        index: int,
        text: str,
        *,
        reason: Any = None,
        logprobs: Logprobs | None = None,
        **extra: Any,
    ) -> Completion:
        choice = CompletionChoice.construct(  # the finish reason of a chunk may be null
            index=self._index(job, index), text=text, finish_reason=reason, logprobs=logprobs
        )
        extra |= self.totals.so_far(self._body)
        return Completion.construct(**self._head, choices=[choice], **extra)

    def _index(self, job: int, index: int) -> int:
        return job * (self._body.n or 1) + index

    def _echo(self, job: int) -> str:
        """The prompt as text, where it is wanted."""
        if not self._body.echo:
            return ""
        prompt = self._body.prompts[job]
        if isinstance(prompt, str):
            return prompt
        return str(self._service.tokenizer.decode(prompt, skip_special_tokens=True))

    def _logprobs(self, entries: Sequence[tuple[int, TokenInfo]]) -> Logprobs | None:
        if self._body.logprobs is None:
            return None
        tokenizer, most = self._service.tokenizer, self._body.logprobs
        return Logprobs(
            tokens=[name(tokenizer, token.token_id)[0] for _, token in entries],
            token_logprobs=[token.logprob or 0.0 for _, token in entries],
            top_logprobs=[
                {name(tokenizer, one)[0]: value for one, value in token.top[:most]}
                for _, token in entries
            ],
            text_offset=[offset for offset, _ in entries],
        )
