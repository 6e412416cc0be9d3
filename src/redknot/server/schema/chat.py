"""The body of /v1/chat/completions."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from redknot.server.schema.common import (
    MAX_ITEMS,
    MAX_TOP_LOGPROBS,
    Common,
    Count,
    Only,
    Strict,
    Text,
)

MAX_TOOLS = 128
MAX_METADATA = 16
_Items = Field(max_length=MAX_ITEMS, fail_fast=True)
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


def _few(value: Any) -> Any:
    """Refuse a long mapping as a whole, before each of its values can be wrong."""
    if isinstance(value, dict) and len(value) > MAX_METADATA:
        words = "a mapping has at most {most} entries here"
        raise PydanticCustomError("too_long", words, {"most": MAX_METADATA})
    return value


Metadata = Annotated[dict[str, str], Field(max_length=MAX_METADATA), BeforeValidator(_few)]


class CacheControl(Strict):
    """Marks a text that comes again."""

    type: Literal["ephemeral"] = "ephemeral"
    ttl: str | None = None


class TextContent(Strict):
    """Plain text; with ``cache_control`` a segment of its own."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None


class SegmentContent(Strict):
    """A text that was registered with /v1/segments."""

    type: Literal["segment"]
    id: Text


class DocumentContent(Strict):
    """A document where it stands in the message."""

    type: Literal["document"]
    text: Text
    title: str = ""


Part = Annotated[TextContent | SegmentContent | DocumentContent, Field(discriminator="type")]
Content = str | Annotated[list[Part], _Items]


class FunctionCall(Strict):
    """A call that the model made."""

    name: Name
    arguments: str


class MadeCall(Strict):
    """A call of an earlier answer."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class SystemMessage(Strict):
    """Instructions."""

    role: Literal["system", "developer"]
    content: Content
    name: str | None = None


class UserMessage(Strict):
    """What the user says."""

    role: Literal["user"]
    content: Content
    name: str | None = None


class AssistantMessage(Strict):
    """An earlier answer, as a client sends it back."""

    role: Literal["assistant"]
    content: Content | None = None
    tool_calls: Annotated[list[MadeCall], _Items] | None = None
    name: str | None = None
    refusal: Annotated[Any, Only()] = None
    annotations: Annotated[Any, Only([])] = None
    audio: Annotated[Any, Only()] = None
    function_call: Annotated[Any, Only()] = None


class ToolMessage(Strict):
    """What a tool gave."""

    role: Literal["tool"]
    content: Content
    tool_call_id: str
    name: str | None = None


Message = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")
]


class DocumentField(Strict):
    """A document of the ``documents`` field."""

    title: str = ""
    text: str | None = None
    content: str | None = None
    "Another name of ``text``."


class Function(Strict):
    """A function that the model may call."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """A tool."""

    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    """A function by name."""

    name: Name


class NamedTool(Strict):
    """The one tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class TextFormat(Strict):
    """Free text."""

    type: Literal["text"]


class JsonFormat(Strict):
    """Any JSON object."""

    type: Literal["json_object"]


class NamedSchema(Strict):
    """A JSON schema."""

    name: Name
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class SchemaFormat(Strict):
    """JSON that a schema describes."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[TextFormat | JsonFormat | SchemaFormat, Field(discriminator="type")]


class ChatRequest(Common):
    """A conversation that wants an answer."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None

    documents: Annotated[list[DocumentField], _Items] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    "Variables for the model's chat template."

    metadata: Metadata | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    modalities: Annotated[Any, Only(["text"])] = None
    audio: Annotated[Any, Only()] = None
    prediction: Annotated[Any, Only()] = None
    reasoning_effort: Annotated[Any, Only("none")] = None
    verbosity: Annotated[Any, Only("medium")] = None
    web_search_options: Annotated[Any, Only()] = None
    functions: Annotated[Any, Only([])] = None
    function_call: Annotated[Any, Only("none", "auto")] = None

    @property
    def offered(self) -> list[Tool]:
        """Tools that the answer may call."""
        return [] if self.tool_choice == "none" else self.tools or []
