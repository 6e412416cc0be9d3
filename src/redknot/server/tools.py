"""Tool calls out of generated text, in the format that the model's chat template asks for."""

import hashlib
import json
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from redknot.models.text import overlap
from redknot.server import tagged

_NAME = re.compile(
    r"\s{0,8}([\w.:-]{1,128})\s{0,8}(?:\[CALL_ID\]\s{0,8}\w{1,64}\s{0,8})?\[ARGS\]\s{0,8}(?=\{)"
)
_NAME_SO_FAR = re.compile(r"\s{0,8}[\w.:-]{0,128}[\s\w\[\]]{0,128}")
"Every beginning of a name, and more."
_MISTRAL_ID = re.compile(r"[A-Za-z0-9]{9}")


WORDS = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "mistral": ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    "llama": ("<|python_tag|>",),
    "tags": ("<tool_call>", "</tool_call>"),
}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that a model made."""

    id: str
    name: str
    arguments: str
    "JSON text of an object."

    @classmethod
    def new(cls, name: str, arguments: str) -> "ToolCall":
        """A call under an id that no other has."""
        return cls(f"call_{uuid.uuid4().hex[:24]}", name, arguments)


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes tool calls."""

    kind: Literal["hermes", "mistral", "llama", "tags"]

    @classmethod
    def of(cls, chat_template: str | None) -> "ToolFormat | None":
        """The format of a template; None if it renders no tools, or in a way unknown here."""
        if chat_template is None or "tools" not in chat_template:
            return None
        if "[TOOL_CALLS]" in chat_template:
            return cls("mistral")
        if "<tool_call>" in chat_template and tagged.BEGIN not in chat_template:
            return cls("hermes")
        if "<tool_call>" in chat_template:
            return cls("tags") if "<parameter=" in chat_template else None
        llama = '"name"' in chat_template and '"parameters"' in chat_template
        return cls("llama") if llama else None

    @property
    def words(self) -> tuple[str, ...]:
        """What stands around calls; may be control tokens, which are to be shown."""
        return WORDS[self.kind]

    @property
    def marker(self) -> str:
        """Begins a call."""
        return self.words[0]

    def for_template(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of a message as templates want them: arguments as objects, ids of their form."""
        made = dict(fields)
        if isinstance(calls := made.get("tool_calls"), list):
            made["tool_calls"] = [self._call(call) for call in calls]
        if isinstance(call_id := made.get("tool_call_id"), str):
            made["tool_call_id"] = self._id(call_id)
        return made

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = dict(call.get("function") or {})
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            value = _object(arguments)
            function["arguments"] = arguments if value is None else value
        made = {**call, "function": function}
        return {**made, "id": self._id(call["id"])} if isinstance(call.get("id"), str) else made

    def _id(self, call_id: str) -> str:
        if self.kind != "mistral" or _MISTRAL_ID.fullmatch(call_id):
            return call_id
        return hashlib.sha256(call_id.encode()).hexdigest()[:9]  # its templates take no others


class ToolParser:
    """Tells calls from content as text arrives; one for each answer.

    White space behind a call is dropped. What begins like a call and turns out to be none comes
    out as content.
    """

    def __init__(self, tools: ToolFormat, schemas: tagged.Schemas) -> None:
        """``schemas`` are those of the tools that are offered."""
        self._kind, self._marker, self._schemas = tools.kind, tools.marker, schemas
        self._text = ""
        "Not yet told; in a call from its marker on, should it have to be told as content."
        self._step = self._start if self._kind == "llama" else self._content
        "What to do next; says whether there may be more to do without more text."
        self._at = 0
        self._name = ""
        self._listed = self._behind_call = False
        self._object: _Object | tagged.Tags = _Object(0)
        self._out: list[str | ToolCall] = []

    def feed(self, text: str) -> list[str | ToolCall]:
        """What is now certain: content that is no call, and complete calls."""
        self._text += text
        while self._step():
            pass
        out, self._out = self._out, []
        return out

    def finish(self) -> list[str | ToolCall]:
        """The rest, when no more text comes."""
        out = self.feed("")
        while self._text:
            if self._step == self._tail:
                self._go_on()
            elif self._step in (self._start, self._content):
                self._tell(len(self._text))
            else:
                self._refuse()
            out += self.feed("")
        return out

    def _start(self) -> bool:
        """Only here may a call come without its marker."""
        said = self._text.lstrip()
        if said.startswith("{"):
            self._at, self._step = 0, self._head
            return True
        if self._marker.startswith(said):
            return False
        self._step = self._content
        return True

    def _content(self) -> bool:
        if self._behind_call:
            self._text = self._text.lstrip()
            self._behind_call = not self._text
        at = self._text.find(self._marker)
        if at >= 0:
            self._tell(at)
            self._at, self._listed, self._name = len(self._marker), False, ""
            self._step = self._head
            return True
        self._tell(len(self._text) - overlap(self._text, self._marker))
        return False

    def _head(self) -> bool:
        """Between the marker, or a separator, and the object."""
        while self._at < len(self._text) and self._text[self._at].isspace():
            self._at += 1
        begins = self._text[self._at : self._at + 1]
        if self._kind == "tags":
            return self._begins_tagged()
        if begins == "{":
            self._object, self._step = _Object(self._at), self._arguments
            return True
        if not begins:
            return False
        if self._kind != "mistral" or self._listed:
            return self._refuse()
        if begins == "[":
            self._at, self._listed = self._at + 1, True
            return True
        if named := _NAME.match(self._text, self._at):
            self._name, self._at = named[1], named.end()
            return True
        return False if _NAME_SO_FAR.fullmatch(self._text, self._at) else self._refuse()

    def _begins_tagged(self) -> bool:
        begins = self._text[self._at : self._at + len(tagged.BEGIN)]
        if begins == tagged.BEGIN:
            self._object, self._step = tagged.Tags(self._at), self._arguments
            return True
        return False if tagged.BEGIN.startswith(begins) else self._refuse()

    def _arguments(self) -> bool:
        """In the object, which holds the arguments and most often the name."""
        end = self._object.end(self._text)
        if end is None:
            return False
        call = self._call(self._text[self._at : end])
        if call is None:
            return self._refuse()
        self._out.append(call)
        self._text, self._step = self._text[end:], self._tail
        return True

    def _tail(self) -> bool:
        """Behind a complete call."""
        self._text = self._text.lstrip()
        if not self._text:
            return False
        first = self._text[0]
        if (self._listed and first == ",") or (self._kind == "llama" and first in ";{"):
            self._at, self._step = int(first != "{"), self._head
            return True
        end = "</tool_call>" if self._marker == "<tool_call>" else "]" * self._listed
        if len(self._text) < len(end) and end.startswith(self._text):
            return False
        self._text = self._text.removeprefix(end)
        return self._go_on()

    def _go_on(self) -> bool:
        self._behind_call, self._step = True, self._content
        return True

    def _refuse(self) -> bool:
        """It is no call: its beginning is content, and what follows may be anything."""
        marked = self._text.startswith(self._marker)
        self._tell(len(self._marker) if marked else 1)
        self._step = self._content
        return True

    def _tell(self, size: int) -> None:
        if size:
            self._out.append(self._text[:size])
            self._text = self._text[size:]

    def _call(self, text: str) -> ToolCall | None:
        if self._kind == "tags":
            read = tagged.read(text, self._schemas)
            return None if read is None else ToolCall.new(read[0], json.dumps(read[1]))
        value = _object(text)
        name: Any = self._name
        if value is not None and not name:
            name = value.get("name")
            said = [value[key] for key in ("arguments", "parameters") if key in value]
            given: Any = said[0] if said else None if self._kind == "llama" else {}
            value = _object(given) if isinstance(given, str) else given
        if not isinstance(value, dict) or not isinstance(name, str) or not name:
            return None
        return ToolCall.new(name, json.dumps(value))


class _Object:
    """Finds where a JSON object ends in a text that grows."""

    def __init__(self, start: int) -> None:
        self._at, self._depth = start, 0
        self._quoted = self._escaped = False

    def end(self, text: str) -> int | None:
        """The place behind the object; None while it goes on."""
        while self._at < len(text):
            char = text[self._at]
            self._at += 1
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped, self._quoted = char == "\\", char != '"'
            elif char == '"':
                self._quoted = True
            elif char in "{}":
                self._depth += 1 if char == "{" else -1
                if not self._depth:
                    return self._at
        return None


def _object(text: str) -> dict[str, Any] | None:
    """The JSON object that ``text`` is, if it is one."""
    try:
        value = json.loads(text, parse_constant=tagged.no_number)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
