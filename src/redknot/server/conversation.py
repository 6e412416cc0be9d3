"""From the messages, documents and tools of a request to what the renderer takes."""

import json
from typing import Any

from redknot.engine.messages import Grammar
from redknot.segments import Document, Prompt
from redknot.server.errors import ApiError
from redknot.server.rendering import ChatMessage, TextPart
from redknot.server.schema import chat as schema
from redknot.server.service import Service


async def prompt_of(service: Service, body: schema.ChatRequest, salt: str) -> Prompt:
    """The rendered conversation."""
    messages = [_message(service, salt, at, message) for at, message in enumerate(body.messages)]
    return await service.off_loop(
        service.renderer.chat,
        messages,
        documents=[_document(at, one) for at, one in enumerate(body.documents or [])],
        tools=[_plain(tool) for tool in body.offered],
        question="auto" if body.redknot is None else body.redknot.question,
        variables=body.chat_template_kwargs,
    )


def grammar_of(body: schema.ChatRequest) -> Grammar | None:
    """The format that was asked for, unless it is free text."""
    wanted = body.response_format
    if isinstance(wanted, schema.JsonFormat):
        return Grammar(kind="json_object")
    if isinstance(wanted, schema.SchemaFormat):
        return Grammar(kind="json_schema", schema=json.dumps(wanted.json_schema.schema_))
    return None


def _message(service: Service, salt: str, at: int, message: schema.Message) -> ChatMessage:
    content = message.content
    if content is None:
        parts: tuple[TextPart | Document, ...] = ()
    elif isinstance(content, str):
        parts = (TextPart(content),)
    else:
        parts = tuple(
            _part(service, salt, part, f"messages[{at}].content[{index}]")
            for index, part in enumerate(content)
        )
    extra: dict[str, Any] = {}
    if message.name is not None:
        extra["name"] = message.name
    if isinstance(message, schema.AssistantMessage) and message.tool_calls:
        extra["tool_calls"] = [_plain(call) for call in message.tool_calls]
    if isinstance(message, schema.ToolMessage):
        extra["tool_call_id"] = message.tool_call_id
    role = "system" if message.role == "developer" else message.role  # templates know no other
    return ChatMessage(role, parts, extra)


def _part(service: Service, salt: str, part: schema.Part, param: str) -> TextPart | Document:
    if isinstance(part, schema.DocumentContent):
        return Document(part.text, part.title)
    if isinstance(part, schema.TextContent):
        return TextPart(part.text, segment=True if part.cache_control is not None else None)
    found = service.registry.get(salt, part.id)
    if found is None:
        message = f"no segment {part.id[:64]!r} is registered"
        raise ApiError(404, message, param=f"{param}.id", code="segment_not_found")
    return Document(found.text, found.title)


def _document(at: int, document: schema.DocumentField) -> Document:
    if (document.text is None) == (document.content is None):
        param = f"documents[{at}].text"
        raise ApiError(400, "a document has either text or content", param=param)
    return Document(document.text or document.content or "", document.title)


def _plain(part: schema.Tool | schema.MadeCall) -> dict[str, Any]:
    return part.model_dump(exclude_none=True, exclude={"index"})
