"""Tool calls written in tags, as Qwen3-Coder writes them: text in, typed arguments out.

Models forget tags. One that is missing is added where the others leave no doubt of its place.
"""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

Schemas = Mapping[str, Mapping[str, Any]]
"JSON schema of the arguments of each tool, by its name."

BEGIN, END = "<function=", "</function>"
OPENS, CLOSES = "<tool_call>", "</tool_call>"
_VALUE, _VALUE_END = "<parameter=", "</parameter>"
_BEHIND_VALUE = (_VALUE, END, CLOSES)
_BEHIND = {END: (CLOSES, OPENS, BEGIN), CLOSES: (OPENS, BEGIN)}
"What follows the end of a call, where no end of its last value was written."
_TAG = re.compile("|".join((_VALUE, _VALUE_END, BEGIN, END, CLOSES)))
_FUNCTION = re.compile(rf"{BEGIN}([^<>\s]{{1,128}})>")
_FUNCTION_SO_FAR = re.compile(rf"{BEGIN}[^<>\s]{{0,128}}")
_PARAMETER = re.compile(rf"{_VALUE}([^<>\n]{{1,128}})>")
_PARAMETER_SO_FAR = re.compile(rf"{_VALUE}[^<>\n]{{0,128}}")
_WINDOW = 256
"Characters within which one tag must follow another."


class Tags:
    """Reads one call in a text that grows; values may hold any tag.

    A value ends with its end tag where another tag of the call follows. Where that was forgotten,
    it ends before the next parameter, or with the function if no more of a parameter comes before
    the next function.
    """

    def __init__(self, start: int, schemas: Schemas, *, bare: bool) -> None:
        """``bare``: nothing before it says that a call comes, so it must be of a known tool."""
        self._at, self._schemas, self._bare = start, schemas, bare
        self._step = self._function
        "What to read next; says whether to go on without more text."
        self._name = self._key = ""
        self._value_at = 0
        self._arguments: dict[str, Any] = {}
        self._last: tuple[int, int] | None = None
        "The end of the function in a value, unless the value turns out to go on."
        self._over: int | None = None
        self.call: tuple[str, dict[str, Any]] | None = None
        "Name and arguments, once the call is complete."

    def end(self, text: str, *, whole: bool) -> int | None:
        """The place behind the call, or behind what shows that it is none; None while it goes on.

        ``whole``: no more text comes.
        """
        while self._over is None and self._step(text, whole):
            pass
        return self._over

    def _function(self, text: str, whole: bool) -> bool:
        named = _FUNCTION.match(text, self._at)
        if named is None:
            return False if _FUNCTION_SO_FAR.fullmatch(text, self._at) else self._break()
        if self._bare and named[1] not in self._schemas:
            return self._break()
        self._name, self._at, self._step = named[1], named.end(), self._between
        return True

    def _between(self, text: str, whole: bool) -> bool:
        """Before a parameter or the end."""
        while self._at < len(text) and text[self._at].isspace():
            self._at += 1
        if parameter := _PARAMETER.match(text, self._at):
            self._key = parameter[1]
            self._at = self._value_at = parameter.end()
            self._step = self._value
            return True
        tag = _ahead(text, self._at, _BEHIND_VALUE)
        if tag in (END, CLOSES):
            return self._complete(self._at + (len(END) if tag == END else 0))
        goes_on = tag is None or _PARAMETER_SO_FAR.fullmatch(text, self._at)
        return False if goes_on else self._break()

    def _value(self, text: str, whole: bool) -> bool:
        """In a value, from tag to tag."""
        tag = _TAG.search(text, self._at)
        if tag is None:
            self._at = max(self._at, len(text) - len(_VALUE_END) + 1)
            return whole and self._last is not None and self._end_both(text, *self._last)
        self._at = tag.start()
        if tag[0] == _VALUE_END:
            return self._value_end(text)
        if tag[0] == _VALUE:
            return self._next_value(text)
        if tag[0] in _BEHIND:
            return self._function_end(text, tag[0], whole)
        if self._last is not None:
            return self._end_both(text, *self._last)
        return self._skip(BEGIN)

    def _value_end(self, text: str) -> bool:
        self._last = None
        behind = self._at + len(_VALUE_END)
        follows = _ahead(text, behind, _BEHIND_VALUE)
        if not follows:
            return follows is not None and self._skip(_VALUE_END)
        self._keep(text, self._at)
        self._at, self._step = behind, self._between
        return True

    def _next_value(self, text: str) -> bool:
        self._last = None
        parameter = _PARAMETER.match(text, self._at)
        if parameter is None and _PARAMETER_SO_FAR.fullmatch(text, self._at):
            return False
        if parameter is None or not self._is_another(parameter[1], text[self._at - 1]):
            return self._skip(_VALUE)
        self._keep(text, self._at)
        self._step = self._between
        return True

    def _is_another(self, key: str, before: str) -> bool:
        """Whether ``key`` in a value begins the next one."""
        if key == self._key or key in self._arguments:
            return False
        return before == "\n" or key in self._properties

    def _function_end(self, text: str, tag: str, whole: bool) -> bool:
        if self._last is None:
            behind = self._at + len(tag)
            follows = _ahead(text, behind, _BEHIND[tag])
            if follows is None and not whole:
                return False
            if follows != "":
                self._last = self._at, behind if tag == END else self._at
        return self._skip(tag)

    def _skip(self, tag: str) -> bool:
        """It is a part of the value."""
        self._at += len(tag)
        return True

    def _keep(self, text: str, end: int) -> None:
        value = text[self._value_at : end].removeprefix("\n").removesuffix("\n")
        root = self._schemas.get(self._name, {})
        self._arguments[self._key] = _typed(value, self._properties.get(self._key), root)

    def _end_both(self, text: str, value_end: int, behind: int) -> bool:
        self._keep(text, value_end)
        return self._complete(behind)

    def _complete(self, behind: int) -> bool:
        self.call, self._over = (self._name, self._arguments), behind
        return False

    def _break(self) -> bool:
        self._over = self._at
        return False

    @property
    def _properties(self) -> Mapping[str, Any]:
        known = self._schemas.get(self._name, {}).get("properties")
        return known if isinstance(known, Mapping) else {}


def _ahead(text: str, at: int, tags: tuple[str, ...]) -> str | None:
    """Which of ``tags`` comes next behind white space; "" if none; None while one still may."""
    window = text[at : at + _WINDOW]
    said = window.lstrip()
    if found := next((tag for tag in tags if said.startswith(tag)), None):
        return found
    may_come = len(window) < _WINDOW and any(tag.startswith(said) for tag in tags)
    return None if may_come else ""


def _typed(text: str, schema: Any, root: Mapping[str, Any]) -> Any:
    """Strings stand there as they are, everything else as JSON, or as Python writes it."""
    types = _types(schema, root)
    if text.strip() in ("null", "None") and "null" in types:
        return None
    if "string" in types or not types - {"null"}:
        return text
    plain = {"True": "true", "False": "false"}.get(text.strip(), text)
    try:
        return read_json(plain)
    except ValueError:
        return text


def _types(schema: Any, root: Mapping[str, Any]) -> set[str]:
    """Types that a schema in ``root`` names itself or by what it refers to."""
    left, followed, types = [schema], {""}, set[str]()
    while left:
        one = left.pop()
        if isinstance(one, list):
            left += one
        if not isinstance(one, Mapping):
            continue
        left += [one.get(key) for key in ("anyOf", "oneOf", "allOf")]
        types |= _own_types(one)
        reference = one.get("$ref")
        if isinstance(reference, str) and reference not in followed:
            followed.add(reference)
            left.append(_referred(reference, root))
    return types


def _own_types(schema: Mapping[str, Any]) -> set[str]:
    """Types that a schema names itself; that of a choice of strings shows."""
    said, values = schema.get("type"), schema.get("enum")
    types = {one for one in (said if isinstance(said, list) else [said]) if isinstance(one, str)}
    values = values if isinstance(values, list) else [schema.get("const")]
    return types | {"string" for value in values if isinstance(value, str)}


def _referred(reference: str, root: Mapping[str, Any]) -> Any:
    """The schema in ``root`` that ``reference`` points to, if there is such."""
    found: Any = root
    for part in reference.removeprefix("#/").split("/"):
        key = part.replace("~1", "/").replace("~0", "~")
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def read_json(text: str) -> Any:
    """What JSON says; `ValueError` where its numbers or its depth are beyond what is written."""
    try:
        return json.loads(text, parse_constant=_finite, parse_float=_finite)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not JSON")
    return number
