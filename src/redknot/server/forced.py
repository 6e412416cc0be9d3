"""Calls of tools that must be made: a grammar forces them, and the whole answer is the call."""

import json
from typing import Any

from redknot.engine.messages import Grammar
from redknot.server.errors import ApiError
from redknot.server.schema import chat as schema
from redknot.server.tools import ToolCall, object_of

ANY_OBJECT: dict[str, Any] = {"type": "object"}
BY_NAME = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
"Keywords under which schemas have names."
PLAIN = ("const", "enum", "default", "examples")
"Keywords under which there are no schemas."


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
        """The call; the text itself where it is none, as when it was cut off.

        A named tool is called in any case: with arguments that were cut off, as OpenAI does it.
        """
        if self._name is not None:
            return [ToolCall.new(self._name, self._text)]
        made = object_of(self._text) or {}
        call = ToolCall.of(made.get("name"), made.get("arguments"))
        return [call or self._text] if self._text else []


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
            "properties": {"name": {"const": tool}, "arguments": {"$ref": f"#/$defs/tool{number}"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for number, tool in enumerate(known)
    ]
    places = {
        f"tool{number}": _moved(arguments, f"#/$defs/tool{number}")
        for number, arguments in enumerate(known.values())
    }
    return Grammar(kind="json_schema", schema=json.dumps({"$defs": places, "anyOf": calls}))


def _moved(part: Any, place: str) -> Any:
    """A schema, or a list of such, whose references still hold when its root is at ``place``."""
    if isinstance(part, list):
        return [_moved(one, place) for one in part]
    if not isinstance(part, dict) or isinstance(part.get("$id"), str):
        return part
    made: dict[str, Any] = {}
    for key, value in part.items():
        if key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
            made[key] = place + value[1:]
        elif key in BY_NAME and isinstance(value, dict):
            made[key] = {name: _moved(one, place) for name, one in value.items()}
        else:
            made[key] = value if key in PLAIN else _moved(value, place)
    return made
