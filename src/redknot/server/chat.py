"""/v1/chat/completions."""

from collections.abc import AsyncIterator, Callable, Iterable
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Body, Request, Response
from fastapi.responses import JSONResponse
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessage
from openai.types.chat.chat_completion import Choice, ChoiceLogprobs
from openai.types.chat.chat_completion_chunk import (
    Choice as ChunkChoice,
)
from openai.types.chat.chat_completion_chunk import (
    ChoiceDelta,
    ChoiceDeltaToolCall,
    ChoiceDeltaToolCallFunction,
)
from openai.types.chat.chat_completion_chunk import (
    ChoiceLogprobs as ChunkLogprobs,
)
from openai.types.chat.chat_completion_message_function_tool_call import (
    ChatCompletionMessageFunctionToolCall,
    Function,
)
from openai.types.chat.chat_completion_token_logprob import (
    ChatCompletionTokenLogprob,
    TopLogprob,
)

from redknot.engine.client import new_request_id
from redknot.engine.messages import Report, TokenInfo
from redknot.server.answer import Answer, unless_left
from redknot.server.choice import Job, Parser, Piece
from redknot.server.conversation import grammar_of, prompt_of
from redknot.server.errors import ApiError
from redknot.server.events import EventStream
from redknot.server.forced import ForcedCall, call_grammar, forced_tool
from redknot.server.names import name
from redknot.server.outcome import Totals, Whole, gather
from redknot.server.schema.chat import ChatRequest
from redknot.server.service import Service
from redknot.server.strict import StrictRoute
from redknot.server.tools import ToolCall, ToolParser

router = APIRouter(route_class=StrictRoute)


@router.post("/v1/chat/completions", response_model=None, tags=["OpenAI"])
async def create_chat_completion(
    request: Request, body: Annotated[ChatRequest, Body()]
) -> Response:
    """Answer a conversation."""
    service: Service = request.app.state.service
    service.check_model(body.model)
    _check(body)
    job = await _job(service, body, request)
    answer = Answer(service, [job], request.state.trace)
    reply = _Reply(service, body, answer)
    if body.stream:
        await unless_left(request, answer.begin())
        return EventStream(answer, reply.chunks())
    whole = await unless_left(request, gather(answer, reply.totals))
    return JSONResponse(reply.whole(whole))


def _check(body: ChatRequest) -> None:
    """What no field shows by itself."""
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        message = "max_tokens and max_completion_tokens are one limit; send one of them"
        raise ApiError(400, message, param="max_tokens")
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs", param="top_logprobs")
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream", param="stream_options")
    if body.tool_choice not in (None, "none", "auto") and not body.tools:
        raise ApiError(400, "tool_choice needs tools", param="tool_choice")
    if body.tool_choice not in (None, "none", "auto") and grammar_of(body) is not None:
        raise ApiError(400, "a call that is due has no response_format", param="response_format")
    if body.offered and grammar_of(body) is not None:
        message = (
            "response_format lets no tool be called freely; say tool_choice none, "
            "or required without response_format, or leave out tools or response_format"
        )
        raise ApiError(400, message, param="response_format")


async def _job(service: Service, body: ChatRequest, request: Request) -> Job:
    tenant, trace = request.state.tenant, request.state.trace
    grammar = grammar_of(body)
    parser: Callable[[], Parser] | None = None
    tool_format = service.renderer.tool_format
    if body.offered and tool_format is None:
        raise ApiError(400, "this model's chat template knows no tools", param="tools")
    if body.offered and body.tool_choice not in (None, "auto"):
        forced = forced_tool(body)
        grammar = call_grammar(body.offered, forced)
        parser = partial(ForcedCall, forced)
    elif body.offered and tool_format is not None:
        schemas = {tool.function.name: tool.function.parameters or {} for tool in body.offered}
        parser = partial(ToolParser, tool_format, schemas)
    prompt = await prompt_of(service, body, tenant.salt)
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    submit = service.submit(
        body,
        prompt,
        trace,
        request_id=new_request_id(),
        salt=tenant.salt,
        max_tokens=service.room(prompt, asked, "messages", body.n),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        grammar=grammar,
    )
    return Job(
        request=submit,
        stop=body.stops,
        parser=parser,
        hidden=frozenset() if parser is None else _hidden(service),
        single_call=body.parallel_tool_calls is False,
    )


def _hidden(service: Service) -> frozenset[int]:
    """Control tokens that no call is written with."""
    tool_format = service.renderer.tool_format
    words = () if tool_format is None else tool_format.words
    return service.renderer.control - {*service.tokenizer.convert_tokens_to_ids(list(words))}


class _Reply:
    """The answer to one request, whole or in chunks."""

    def __init__(self, service: Service, body: ChatRequest, answer: Answer) -> None:
        self._service, self._body, self._answer = service, body, answer
        self.totals = Totals.of(answer)
        self._head: dict[str, Any] = {
            "id": f"chatcmpl-{answer.jobs[0].request.request_id}",
            "created": self.totals.created,
            "model": service.model,
        }

    def whole(self, choices: dict[tuple[int, int], Whole]) -> dict[str, Any]:
        """The body of a plain answer."""
        made = [self._choice(index, whole) for (_, index), whole in choices.items()]
        completion = ChatCompletion(
            **self._head,
            object="chat.completion",
            choices=made,
            usage=self.totals.usage(),
            **self.totals.extra(self._body),
        )
        return completion.model_dump(mode="json", exclude_unset=True)

    async def chunks(self) -> AsyncIterator[ChatCompletionChunk]:
        """The same in pieces."""
        num_calls: dict[int, int] = {}
        for index in range(self._body.n or 1):
            yield self._chunk(index, ChoiceDelta(role="assistant", content=""))
        left = self._body.n or 1
        async for job, update in self._answer.updates():
            self.totals.add(job, update)
            if isinstance(update, Report):
                continue
            if isinstance(update, Piece):
                delta = _delta(update, num_calls)
                logprobs = None
                if self._body.logprobs:
                    logprobs = ChunkLogprobs(content=self._logprobs(update.logprobs), refusal=None)
                yield self._chunk(update.choice, delta, logprobs=logprobs)
                continue
            left -= 1
            extra = {} if left else self.totals.extra(self._body)
            yield self._chunk(update.choice, ChoiceDelta(), reason=update.reason, **extra)
        if self._body.wants_usage:
            yield ChatCompletionChunk(
                **self._head,
                object="chat.completion.chunk",
                choices=[],
                usage=self.totals.usage(),
            )

    def _choice(self, index: int, whole: Whole) -> Choice:
        calls: dict[str, Any] = {}
        if whole.calls:
            calls["tool_calls"] = [
                ChatCompletionMessageFunctionToolCall(
                    id=call.id,
                    type="function",
                    function=Function(name=call.name, arguments=call.arguments),
                )
                for call in whole.calls
            ]
        content = whole.text if whole.text or not whole.calls else None
        logprobs = None
        if self._body.logprobs:
            logprobs = ChoiceLogprobs(content=self._logprobs(whole.logprobs), refusal=None)
        return Choice(
            index=index,
            finish_reason=whole.reason,
            message=ChatCompletionMessage(role="assistant", content=content, refusal=None, **calls),
            logprobs=logprobs,
        )

    def _chunk(
        self,
        index: int,
        delta: ChoiceDelta,
        *,
        logprobs: ChunkLogprobs | None = None,
        reason: Any = None,
        **extra: Any,
    ) -> ChatCompletionChunk:
        choice = ChunkChoice(index=index, delta=delta, finish_reason=reason, logprobs=logprobs)
        return ChatCompletionChunk(
            **self._head,
            object="chat.completion.chunk",
            choices=[choice],
            **self.totals.so_far(self._body),
            **extra,
        )

    def _logprobs(
        self, entries: Iterable[tuple[int, TokenInfo]]
    ) -> list[ChatCompletionTokenLogprob]:
        return [self._logprob(token) for _, token in entries]

    def _logprob(self, token: TokenInfo) -> ChatCompletionTokenLogprob:
        text, raw = name(self._service.tokenizer, token.token_id)
        top = []
        for token_id, logprob in token.top[: self._body.top_logprobs or 0]:
            other, its = name(self._service.tokenizer, token_id)
            top.append(TopLogprob(token=other, bytes=its, logprob=logprob))
        return ChatCompletionTokenLogprob(
            token=text, bytes=raw, logprob=token.logprob or 0.0, top_logprobs=top
        )


def _delta(piece: Piece, num_calls: dict[int, int]) -> ChoiceDelta:
    call = piece.content
    if not isinstance(call, ToolCall):
        return ChoiceDelta(content=call)
    at = num_calls.get(piece.choice, 0)
    num_calls[piece.choice] = at + 1
    function = ChoiceDeltaToolCallFunction(name=call.name, arguments=call.arguments)
    return ChoiceDelta(
        tool_calls=[ChoiceDeltaToolCall(index=at, id=call.id, type="function", function=function)]
    )
