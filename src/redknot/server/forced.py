"""Calls of tools that must be made: a grammar forces them, and the whole answer is the call."""

import json
from typing import Any

from redknot.engine.messages import Grammar
from redknot.server.errors import ApiError
from redknot.server.schema import chat as schema
from redknot.server.tools import ToolCall

ANY_OBJECT: dict[str, Any] = {"type": "object"}


class ForcedCall:
    """A parser of answers that are one call and nothing else."""

    def __init__(self, name: str | None) -> None:
        """``name`` is that of the one tool; without it the answer says which."""
        self._name, self._text = name, ""

    def feed(self, text: str) -> list[str | ToolCall]:
        """Nothing is certain before the end."""
        self._text += text
        return []

    def finish(self) -> list[str | ToolCall]:
        """The call; the text itself where it was cut off."""
        if self._name is not None:
            return [ToolCall.new(self._name, self._text)]
        try:
            made = json.loads(self._text)
            arguments = json.dumps(made["arguments"], ensure_ascii=False)
            return [ToolCall.new(made["name"], arguments)]
        except (ValueError, KeyError, TypeError):
            return [self._text] if self._text else []


def forced_tool(body: schema.ChatRequest) -> str | None:
    """Name of the one tool that must be called, if there is such."""
    if not isinstance(body.tool_choice, schema.NamedTool):
        return None
    name = body.tool_choice.function.name
    if all(tool.function.name != name for tool in body.tools or []):
        raise ApiError(400, f"tool_choice names no tool: {name!r}", param="tool_choice")
    return name


def call_grammar(tools: list[schema.Tool], name: str | None) -> Grammar:
    """What a call looks like: arguments of the tool ``name``, or a name and arguments."""
    known = {tool.function.name: tool.function.parameters or ANY_OBJECT for tool in tools}
    if name is not None:
        return Grammar(kind="json_schema", schema=json.dumps(known[name]))
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool}, "arguments": arguments},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool, arguments in known.items()
    ]
    return Grammar(kind="json_schema", schema=json.dumps({"anyOf": calls}))
