"""Tool calls written in tags, as Qwen3-Coder writes them: text in, typed arguments out."""

import json
import re
from collections.abc import Mapping
from typing import Any

Schemas = Mapping[str, Mapping[str, Any]]
"JSON schema of the arguments of each tool, by its name."

BEGIN, END = "<function=", "</function>"
_CALL = re.compile(rf"{BEGIN}([^<>\s]{{1,128}})>(.*){END}", re.DOTALL)
_PARAMETER = re.compile(
    r"\s*<parameter=([^<>\n]{1,128})>(.*?)</parameter>\s*(?=<parameter=|\Z)", re.DOTALL
)


class Tags:
    """Finds where a call ends in a text that grows. Values may hold any tag but their own end."""

    def __init__(self, start: int) -> None:
        self._start = self._at = start

    def end(self, text: str) -> int | None:
        """The place behind the call; None while it goes on."""
        while (found := text.find(END, self._at)) >= 0:
            self._at = found + len(END)
            inside = text[self._start : found].rstrip()
            if inside.endswith("</parameter>") or "<parameter=" not in inside:
                return self._at
        self._at = max(self._at, len(text) - len(END) + 1)
        return None


def read(text: str, schemas: Schemas) -> tuple[str, dict[str, Any]] | None:
    """Name and arguments of a complete call, if ``text`` is one."""
    call = _CALL.fullmatch(text)
    if call is None:
        return None
    name, body = call.groups()
    known, at, arguments = schemas.get(name, {}).get("properties"), 0, dict[str, Any]()
    while at < len(body.rstrip()):
        parameter = _PARAMETER.match(body, at)
        if parameter is None:
            return None
        key, value = parameter.groups()
        schema = known.get(key) if isinstance(known, Mapping) else None
        arguments[key] = _typed(value.removeprefix("\n").removesuffix("\n"), schema)
        at = parameter.end()
    return name, arguments


def _typed(text: str, schema: Any) -> Any:
    """Strings stand there as they are, everything else as JSON, or as Python writes it."""
    types = _types(schema)
    if text.strip() in ("null", "None") and "null" in types:
        return None
    if "string" in types or schema is None:
        return text
    plain = {"True": "true", "False": "false"}.get(text.strip(), text)
    try:
        return json.loads(plain, parse_constant=no_number)
    except (ValueError, RecursionError):
        return text


def _types(schema: Any) -> set[str]:
    """Types that a schema names; none where it says so in another way."""
    if not isinstance(schema, Mapping):
        return set()
    said = [schema.get(key) for key in ("type", "anyOf", "oneOf")]
    types = set[str]()
    for one in (
        inner for outer in said for inner in (outer if isinstance(outer, list) else [outer])
    ):
        types |= {one} if isinstance(one, str) else _types(one)
    return types


def no_number(name: str) -> float:
    """Refuses what Python reads as JSON and nobody else does."""
    raise ValueError(f"{name} is not JSON")
