"""Tool calls out of generated text, in the format that the model's chat template asks for."""

import hashlib
import json
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import TypeAdapter

from redknot.models.text import overlap
from redknot.server import tagged
from redknot.server.schema.chat import Name

_CALL_NAME = TypeAdapter[str](Name)
"As requests want names of earlier calls."
_NAME = re.compile(
    r"\s{0,8}([\w.:-]{1,128})\s{0,8}(?:\[CALL_ID\]\s{0,8}\w{1,64}\s{0,8})?\[ARGS\]\s{0,8}(?=\{)"
)
_NAME_SO_FAR = re.compile(r"\s{0,8}[\w.:-]{0,128}[\s\w\[\]]{0,128}")
"Every beginning of a name, and more."
_MISTRAL_ID = re.compile(r"[A-Za-z0-9]{9}")
MAX_TRIES = 8
"Calls that are looked for in one stretch of text that turned out to hold none."

WORDS = {
    "hermes": (tagged.OPENS, tagged.CLOSES),
    "mistral": ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
    "llama": ("<|python_tag|>",),
    "tags": (tagged.OPENS, tagged.CLOSES),
}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that a model made."""

    id: str
    name: str
    arguments: str
    "JSON text of an object; of a tool that had to be called, it may be cut off."

    @classmethod
    def new(cls, name: str, arguments: str) -> "ToolCall":
        """A call under an id that no other has."""
        return cls(f"call_{uuid.uuid4().hex[:24]}", name, arguments)

    @classmethod
    def of(cls, name: Any, arguments: Any) -> "ToolCall | None":
        """The call, if a later request may tell of it and its arguments are an object."""
        if not isinstance(arguments, dict):
            return None
        try:
            return cls.new(_CALL_NAME.validate_python(name), json.dumps(arguments))
        except (ValueError, RecursionError):
            return None


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
        if tagged.OPENS in chat_template and tagged.BEGIN not in chat_template:
            return cls("hermes")
        if tagged.OPENS in chat_template:
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
            value = object_of(arguments)
            function["arguments"] = arguments if value is None else _writable(value)
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
        self._openings = (self._marker, *([tagged.BEGIN] if self._kind == "tags" else []))
        self._opening = re.compile("|".join(map(re.escape, self._openings)))
        self._text = ""
        "Not yet told; in a call from its marker on, should it have to be told as content."
        self._step = self._start if self._kind == "llama" else self._content
        "What to do next; says whether there may be more to do without more text."
        self._at = 0
        self._name = ""
        self._whole = self._listed = self._behind_call = False
        self._reader: _Object | tagged.Tags = _Object(0)
        self._read = self._tries = 0
        "Up to where the text was read for calls that were none, and how many."
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
        self._whole = True
        out = self.feed("")
        while self._text:
            if self._step == self._tail:
                self._go_on()
            elif self._step in (self._start, self._content):
                self._tell(len(self._text))
            else:
                self._refuse(len(self._text))
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
            self._drop_space()
            self._behind_call = not self._text
        found = self._opening.search(self._text)
        if found is None:
            held = max(overlap(self._text, word) for word in self._openings)
            self._tell(len(self._text) - held)
            return False
        self._tell(found.start())
        marked = found[0] == self._marker
        self._at, self._name, self._step = len(found[0]) if marked else 0, "", self._head
        self._listed = marked and self._kind == "tags"
        return True

    def _head(self) -> bool:
        """Between the marker, or a separator, and the object."""
        while self._at < len(self._text) and self._text[self._at].isspace():
            self._at += 1
        begins = self._text[self._at : self._at + 1]
        if self._kind == "tags":
            return self._begins_tagged()
        if begins == "{":
            self._reader, self._step = _Object(self._at), self._arguments
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
            self._reader = tagged.Tags(self._at, self._schemas, bare=not self._listed)
            self._step = self._arguments
            return True
        return False if tagged.BEGIN.startswith(begins) else self._refuse()

    def _arguments(self) -> bool:
        """In the object, which holds the arguments and most often the name."""
        end = self._reader.end(self._text, whole=self._whole)
        if end is None:
            return False
        call = self._call(end)
        if call is None:
            return self._refuse(end)
        self._out.append(call)
        self._drop(end)
        self._step = self._tail
        return True

    def _tail(self) -> bool:
        """Behind a complete call."""
        self._drop_space()
        if not self._text:
            return False
        end = tagged.CLOSES if self._marker == tagged.OPENS else "]" * self._listed
        another = self._another()
        if any(word != self._text and word.startswith(self._text) for word in (end, *another)):
            return False
        if word := next((word for word in another if self._text.startswith(word)), None):
            self._at = len(word) if word in ",;" else 0
            self._step = self._head
            return True
        self._drop(len(end) if self._text.startswith(end) else 0)
        return self._go_on()

    def _another(self) -> tuple[str, ...]:
        """What leads from a call to another that has no marker of its own."""
        if self._kind == "llama":
            return (";", "{")
        listed = {"mistral": (",",), "tags": (tagged.BEGIN,)}
        return listed.get(self._kind, ()) if self._listed else ()

    def _go_on(self) -> bool:
        self._behind_call, self._step = True, self._content
        return True

    def _refuse(self, read: int = 0) -> bool:
        """It is no call: its beginning is content, and what follows may be anything.

        Up to ``read`` the text was read for it. What was read `MAX_TRIES` times is content as a
        whole: text that only begins calls would keep the server from all else.
        """
        if read:
            self._tries = self._tries + 1 if self._read else 1
            self._read = max(self._read, read)
        begins = len(self._marker) if self._text.startswith(self._marker) else 1
        self._tell(max(begins, self._read) if read and self._tries >= MAX_TRIES else begins)
        self._step = self._content
        return True

    def _tell(self, size: int) -> None:
        if size:
            self._out.append(self._text[:size])
            self._drop(size)

    def _drop(self, size: int) -> None:
        self._text = self._text[size:]
        self._read = max(0, self._read - size)

    def _drop_space(self) -> None:
        self._drop(len(self._text) - len(self._text.lstrip()))

    def _call(self, end: int) -> ToolCall | None:
        """The call that the reader has read."""
        if isinstance(self._reader, tagged.Tags):
            return None if self._reader.call is None else ToolCall.of(*self._reader.call)
        value = object_of(self._text[self._at : end])
        if value is None or self._name:
            return ToolCall.of(self._name, value)
        said = [value[key] for key in ("arguments", "parameters") if key in value]
        given: Any = said[0] if said else None if self._kind == "llama" else {}
        return ToolCall.of(value.get("name"), object_of(given) if isinstance(given, str) else given)


class _Object:
    """Finds where a JSON object ends in a text that grows."""

    def __init__(self, start: int) -> None:
        self._at, self._depth = start, 0
        self._quoted = self._escaped = False

    def end(self, text: str, *, whole: bool) -> int | None:
        """The place behind the object; None while it goes on, even in a ``whole`` text."""
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


def object_of(text: str) -> dict[str, Any] | None:
    """The JSON object that ``text`` is, if it is one."""
    try:
        value = tagged.read_json(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _writable(value: dict[str, Any]) -> Any:
    """``value`` with a question mark for each half of a character, which no text can hold."""
    return json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
