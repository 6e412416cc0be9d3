"""Answers as server-sent events."""

import json
from collections.abc import AsyncIterator

from openai import BaseModel
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from redknot.server.answer import Answer
from redknot.server.errors import owned
from redknot.server.logs import Trace

DONE = "data: [DONE]\n\n"


class EventStream(StreamingResponse):
    """Sends chunks as they come; whatever ends it also ends the work behind it."""

    _trace: Trace
    "Of the request, from when it is answered."

    def __init__(self, answer: Answer, chunks: AsyncIterator[BaseModel]) -> None:
        super().__init__(
            self._events(chunks),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it all, or as much as the client takes."""
        self._trace = scope["state"]["trace"]
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answer.close()

    async def _events(self, chunks: AsyncIterator[BaseModel]) -> AsyncIterator[str]:
        """An error after the first chunk is an event, because the status is already told."""
        try:
            async for chunk in chunks:
                yield f"data: {chunk.model_dump_json(exclude_unset=True)}\n\n"
        except Exception as error:  # noqa: BLE001 - whatever it is, the stream ends as promised
            yield f"data: {json.dumps(owned(error, self._trace).body())}\n\n"
        yield DONE
