"""Tool calls are found in every format and cut of a stream, and nothing else is lost."""

import json
from itertools import pairwise
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from tests.server.templates import PLAIN, TOOLS

from redknot.server import tagged, tools
from redknot.server.tools import ToolCall, ToolFormat, ToolParser

ONE = '{"name": "find", "arguments": {"text": "a } \\" </tool_call> { é", "n": [1, {"m": null}]}}'
ARGUMENTS = json.loads(ONE)["arguments"]
TWO = '{"name": "stop", "arguments": {}}'
LLAMA = ONE.replace("arguments", "parameters")
CALLS = {
    "hermes": ("hermes", f"<tool_call>\n{ONE}\n</tool_call>\n<tool_call>{TWO}</tool_call>\n"),
    "mistral list": ("mistral", f"[TOOL_CALLS] [{ONE}, {TWO}]"),
    "mistral names": (
        "mistral",
        f"[TOOL_CALLS]find[ARGS]{json.dumps(ARGUMENTS)}[TOOL_CALLS] stop[CALL_ID]abc12[ARGS]{{}}",
    ),
    "tags": (
        "tags",
        f"<tool_call>\n<function=find>\n<parameter=text>\n{ARGUMENTS['text']}\n</parameter>\n"
        f"<parameter=n>{json.dumps(ARGUMENTS['n'])}</parameter></function>\n</tool_call>\n"
        "<tool_call><function=stop>\n</function></tool_call>",
    ),
    "llama": ("llama", f"{LLAMA}; {TWO}"),
    "llama lines": ("llama", f"\n{LLAMA}\n{TWO}\n"),
    "llama tag": ("llama", f"<|python_tag|>{LLAMA};{TWO}"),
}
KINDS = ["hermes", "mistral", "llama", "tags"]
SCHEMAS = {"find": {"properties": {"text": {"type": "string"}, "n": {"type": "array"}}}}


def parse(kind: Any, pieces: list[str], schemas: Any = SCHEMAS) -> list[str | ToolCall]:
    """What the pieces give, neighbouring content joined."""
    parser = ToolParser(ToolFormat(kind), schemas)
    out: list[str | ToolCall] = []
    for one in [*(one for piece in pieces for one in parser.feed(piece)), *parser.finish()]:
        if isinstance(one, str) and out and isinstance(out[-1], str):
            out[-1] += one
        else:
            out.append(one)
    assert parser.finish() == []
    return out


def said(out: list[str | ToolCall]) -> list[Any]:
    return [one if isinstance(one, str) else (one.name, json.loads(one.arguments)) for one in out]


@pytest.mark.parametrize("name", CALLS)
def test_calls_are_found(name: str) -> None:
    kind, text = CALLS[name]
    out = parse(kind, [text])
    assert said(out) == [("find", ARGUMENTS), ("stop", {})]
    ids = [one.id for one in out if isinstance(one, ToolCall)]
    assert len(set(ids)) == 2
    assert all(one.startswith("call_") for one in ids)


@pytest.mark.parametrize("name", ["hermes", "mistral list", "mistral names", "llama tag", "tags"])
def test_content_before_a_call_comes_at_once_and_behind_it_too(name: str) -> None:
    kind, text = CALLS[name]
    parser = ToolParser(ToolFormat(kind), SCHEMAS)
    assert parser.feed("Let me see") == ["Let me see"]
    assert parser.feed(": < {") == [": < {"]
    assert said(parser.feed(text) + parser.feed(" and so on")) == [
        ("find", ARGUMENTS),
        ("stop", {}),
        "and so on",
    ]


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_told_as_soon_as_it_is_complete(name: str) -> None:
    kind, text = CALLS[name]
    parser = ToolParser(ToolFormat(kind), SCHEMAS)
    at = []
    for number, char in enumerate(text):
        at += [number] * len(parser.feed(char))
    assert len(at) == 2
    assert at[0] < text.index("stop") < at[1]
    assert text[at[0]] == text[at[1]] == (">" if name == "tags" else "}")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "text",
    [
        "plain text",
        "",
        "  \n",
        "a < b <tool and [TOOL or <|py",
        '{"answer": 1}',
        '{"name": "no arguments"}',
        "{not json}",
        '{"name": 5, "parameters": {}}',
        '{"name": "", "parameters": {}}',
        '{"name": "f", "parameters": [1]}',
        '{"name": "f", "parameters": {"x": NaN}}',
        '{"name": "f", "parameters": {"x": [-1e999]}}',
        '{"name": "open',
        "{" * 5000,
    ],
)
def test_what_is_no_call_is_content_with_and_without_the_marker(kind: Any, text: str) -> None:
    assert "".join(map(str, said(parse(kind, [text])))) == text
    opening = ToolFormat(kind).marker + ("[" if kind == "mistral" else "")
    for whole in (opening + text, "x" + opening + text + "</tool_call>]"):
        if kind in ("llama", "tags") or "no arguments" not in text:  # else they may be left out
            assert said(parse(kind, [whole])) == [whole]


def test_a_call_behind_a_broken_one_is_found() -> None:
    assert said(parse("hermes", [f"<tool_call>{{x}}</tool_call><tool_call>{TWO}</tool_call>"])) == [
        "<tool_call>{x}</tool_call>",
        ("stop", {}),
    ]
    unended = f'<tool_call>{{"name": "<tool_call>{TWO}</tool_call>'
    assert said(parse("hermes", [unended]))[-1] == ("stop", {})
    assert said(parse("mistral", [f"[TOOL_CALLS][{TWO}, {{x}}]"])) == [("stop", {}), ", {x}]"]


UNENDED = {
    "hermes": "<tool_call>{",
    "mistral": "[TOOL_CALLS][{",
    "llama": "<|python_tag|>{",
    "tags": "<tool_call><function=find><parameter=text>",
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ended", [True, False])
def test_calls_that_begin_and_do_not_end_are_read_a_few_times_only(
    kind: Any, ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def counted(end: Any) -> Any:
        return lambda self, text, *, whole: (read.append(text), end(self, text, whole=whole))[1]

    for reader in (tools._Object, tagged.Tags):
        monkeypatch.setattr(reader, "end", counted(reader.end))
    text = UNENDED[kind] * 20_000 + "}" * 20_000 * ended
    assert said(parse(kind, [text])) == [text]
    assert len(read) <= 20


def test_arguments_may_be_text_and_a_closing_tag_may_be_missing() -> None:
    text = '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}'
    assert said(parse("hermes", [text])) == [("f", {"x": 1})]
    assert said(parse("hermes", ['<tool_call>{"name": "f"}</tool'])) == [("f", {}), "</tool"]


TYPED = [
    ("12", {"type": "string"}, "12"),
    ("12", {"type": ["integer", "string"]}, "12"),
    ("12", {"type": "integer"}, 12),
    (" 1.5 ", {"type": "number"}, 1.5),
    ("true", {"type": "boolean"}, True),
    ("False", {"type": "boolean"}, False),
    ("null", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
    ("None", {"type": ["object", "null"]}, None),
    ("null", {"type": "string"}, "null"),
    ('[{"a": "b"}]', {"type": "array"}, [{"a": "b"}]),
    ('{"a": 1}', {"oneOf": [{"type": "object"}]}, {"a": 1}),
    ("12", {"oneOf": [{"type": "integer"}, {"type": "string"}]}, "12"),
    ("{'a': 1}", {"type": "object"}, "{'a': 1}"),
    ("NaN", {"type": "number"}, "NaN"),
    ("-1e999", {"type": "number"}, "-1e999"),
    ("[" * 9999, {"type": "array"}, "[" * 9999),
    ("12", None, "12"),
    ("12", "no schema", "12"),
    ("12", {}, "12"),
    ("12", {"type": 5, "anyOf": [7, {"type": {}}]}, "12"),
    ("12", {"anyOf": [{"type": "null"}, {"description": "of any type"}]}, "12"),
    ("12", {"enum": ["12", "13"]}, "12"),
    ("12", {"const": "12"}, "12"),
    ("12", {"enum": [12, 13]}, "12"),
    ("12", {"anyOf": [{"type": "integer"}, {"enum": ["12"]}]}, "12"),
    ("12", {"allOf": [{"type": "integer"}, {"minimum": 1}]}, 12),
    ("12", {"$ref": "#/$defs/Number"}, 12),
    ("12", {"allOf": [{"$ref": "#/definitions/Old"}], "description": "as pydantic 1"}, 12),
    ("12", {"$ref": "#/$defs/with~1slash"}, 12),
    ("12", {"$ref": "#/$defs/Choice"}, "12"),
    ("12", {"$ref": "#/$defs/Itself"}, "12"),
    ("12", {"$ref": "#/$defs/Nothing"}, "12"),
    ("12", {"$ref": "https://example.com/number"}, "12"),
    ('{"a": 1}', {"$ref": "#/$defs/Object"}, {"a": 1}),
    ('{"a": 1}', {"$ref": "#/x"}, '{"a": 1}'),
    ("\n two lines\n\n", {"type": "string"}, ...),
    ("1</parameter>y<parameter=z>1", {"type": "string"}, ...),
    ("<b>a</b> </function> </tool_call> </parameter> {", {"type": "string"}, ...),
    ("a </function></tool_call> b", {"type": "string"}, ...),
    ("</function>\n</tool_call>", {"type": "string"}, ...),
    ("", {"type": "string"}, ""),
]
DEFINED = {
    "$defs": {
        "Number": {"type": "integer"},
        "with/slash": {"$ref": "#/$defs/Number"},
        "Choice": {"enum": ["12"]},
        "Itself": {"anyOf": [{"$ref": "#/$defs/Itself"}] * 9},
        "Object": {"type": "object"},
    },
    "definitions": {"Old": {"type": "integer"}},
}


@pytest.mark.parametrize(("text", "schema", "wanted"), TYPED)
def test_a_value_in_tags_has_the_type_that_the_tool_says(
    text: str, schema: Any, wanted: Any
) -> None:
    wanted = text if wanted is ... else wanted
    for edge in ("", "\n"):
        call = f"<function=f>{edge}<parameter=a b>\n{text}\n</parameter>{edge}</function>"
        parser = ToolParser(ToolFormat("tags"), {"f": DEFINED | {"properties": {"a b": schema}}})
        assert said(parser.feed(f"<tool_call>{edge}{call}{edge}</tool_call>")) == [
            ("f", {"a b": wanted})
        ]


@pytest.mark.parametrize("schema", [{}, {"properties": []}, {"properties": {"other": {}}}])
def test_a_value_that_no_schema_names_is_text(schema: Any) -> None:
    parser = ToolParser(ToolFormat("tags"), {"f": schema} if schema else {})
    text = "<tool_call><function=f><parameter=x>5</parameter></function>"
    assert said(parser.feed(text)) == [("f", {"x": "5"})]


A_IS_X = "<function=f><parameter=a>x</parameter></function>"
FORGOTTEN = {
    "end of a value": (
        "<tool_call>\n<function=f>\n<parameter=a>\nx\n<parameter=b>\n2\n</parameter>\n"
        "</function>\n</tool_call>",
        [("f", {"a": "x", "b": 2})],
    ),
    "end of a value of an unknown parameter": (
        "<tool_call><function=f><parameter=y>\nx\n<parameter=z>\n2\n</parameter></function>",
        [("f", {"y": "x", "z": "2"})],
    ),
    "ends of all values": (
        "<tool_call><function=f><parameter=a>x<parameter=b>2</function></tool_call>",
        [("f", {"a": "x", "b": 2})],
    ),
    "end of the last value before another call": (
        "<tool_call>\n<function=f>\n<parameter=a>\nx\n</function>\n</tool_call>\n"
        f"<tool_call>{A_IS_X}</tool_call>",
        [("f", {"a": "x"})] * 2,
    ),
    "end of the last value at the end": (
        "<tool_call><function=f><parameter=a>x</function>\n",
        [("f", {"a": "x"})],
    ),
    "end of the last value and of its call": (
        "<tool_call><function=f><parameter=a>x</function><tool_call><function=f></function>",
        [("f", {"a": "x"}), ("f", {})],
    ),
    "end of the last value before content": (
        "<tool_call><function=f><parameter=a>x</function></tool_call>\n and so on",
        [("f", {"a": "x"}), "and so on"],
    ),
    "end of the last value before another function": (
        f"<tool_call><function=f><parameter=a>x</function>{A_IS_X}</tool_call>",
        [("f", {"a": "x"})] * 2,
    ),
    "beginning of the call": (
        f"I look.\n\n{A_IS_X}\n</tool_call>\nDone",
        ["I look.\n\n", ("f", {"a": "x"}), "Done"],
    ),
    "beginning of both calls": (f"{A_IS_X}\n{A_IS_X}", [("f", {"a": "x"})] * 2),
    "all between two functions": (
        f"<tool_call>\n{A_IS_X}\n<function=g></function></tool_call>.",
        [("f", {"a": "x"}), ("g", {}), "."],
    ),
    "end of the function": (
        "<tool_call><function=f><parameter=a>x</parameter>\n</tool_call>.",
        [("f", {"a": "x"}), "."],
    ),
    "end of a function without arguments": ("<tool_call><function=f></tool_call>", [("f", {})]),
    "ends of the value and of the function": (
        f"<tool_call><function=f><parameter=a>\nx\n</tool_call>\n<tool_call>{A_IS_X}</tool_call>",
        [("f", {"a": "x"})] * 2,
    ),
}


@pytest.mark.parametrize("forgotten", FORGOTTEN)
def test_a_tag_may_be_forgotten(forgotten: str) -> None:
    text, wanted = FORGOTTEN[forgotten]
    schemas = {"f": {"properties": {"a": {"type": "string"}, "b": {"type": "integer"}}}}
    assert said(parse("tags", [text], schemas)) == wanted
    assert said(parse("tags", list(text), schemas)) == wanted


def test_without_a_marker_only_offered_tools_are_called() -> None:
    text = f"{A_IS_X} and <function=find> or <function=find"
    parser = ToolParser(ToolFormat("tags"), SCHEMAS)
    assert "".join(map(str, parser.feed(text))) == text.removesuffix("<function=find")
    assert "".join(map(str, parser.finish())) == "<function=find"


@pytest.mark.parametrize("name", ["look up it", "a:b", "ž", "n" * 65, "\ud83d", ""])
def test_a_name_that_no_later_request_may_tell_is_none(name: Any) -> None:
    made = json.dumps({"name": name, "arguments": {}})
    llama = made.replace("arguments", "parameters")
    written = {
        "hermes": f"<tool_call>{made}</tool_call>",
        "mistral": f"[TOOL_CALLS][{made}]",
        "llama": llama,
        "tags": f"<tool_call><function={name}></function></tool_call>",
    }
    for kind, text in [*written.items(), ("mistral", f"[TOOL_CALLS]{name}[ARGS]{{}}")]:
        assert said(parse(kind, [text])) == [text]


@pytest.mark.parametrize(
    "text",
    [
        "<function=>\n</function>",
        "<function=f g>\n</function>",
        "<function=f>x</function>",
        "<function=f><parameter=x>1</parameter>",
        "<function=f><parameter=>1</parameter></function>",
        "<functio",
        "f",
    ],
)
def test_broken_tags_are_content(text: str) -> None:
    whole = f"<tool_call>{text}"
    assert said(parse("tags", [whole])) == [whole]


SNIPPETS = [
    *(text for _, text in CALLS.values()),
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>"),
    *("<function=", "<function=f>", "</function>", "<parameter=x>", "</parameter>"),
    *("<function=find>", "<parameter=n>", "\n<parameter=y>\n", "</function></tool_call>"),
    *("<tool_call><function=find><parameter=text>", "</parameter></function>", " " * 260),
    *("[", "]", "{", "}", ",", ";", '"', "\\", " ", "\n", "name", "hello", TWO, "{x}", "n" * 130),
]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(SNIPPETS), max_size=8), st.data())
def test_a_stream_in_any_cuts_gives_what_the_whole_gives(
    kind: Any, snippets: list[str], data: st.DataObject
) -> None:
    text = "".join(snippets)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=9)))
    edges = [0, *cuts, len(text)]
    pieces = [text[a:b] for a, b in pairwise(edges)]
    whole = said(parse(kind, [text]))
    assert said(parse(kind, pieces)) == whole
    assert said(parse(kind, list(text))) == whole


@pytest.mark.parametrize("kind", TOOLS)
def test_the_format_is_read_off_the_template(kind: str) -> None:
    assert ToolFormat.of(TOOLS[kind]) == ToolFormat(kind)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "template",
    [None, *PLAIN.values(), "{{ tools | tojson }}", "{{ tools }}<tool_call>\n<function=name>"],
)
def test_templates_without_tools_or_with_unknown_calls_have_no_format(template: str | None) -> None:
    assert ToolFormat.of(template) is None


@pytest.mark.parametrize("kind", KINDS)
def test_fields_are_given_to_templates_as_they_want_them(kind: Any) -> None:
    function = {"name": "f", "arguments": '{"x": [1]}'}
    fields = {"tool_calls": [{"id": "call_1", "function": function}], "tool_call_id": "call_1"}
    made = ToolFormat(kind).for_template({**fields, "name": "n"})
    assert made["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": [1]}}
    assert made["tool_calls"][0]["id"] == made["tool_call_id"]
    assert (len(made["tool_call_id"]) == 9) == (kind == "mistral")
    assert made["name"] == "n"
    assert function["arguments"] == '{"x": [1]}'
    broken = {"tool_calls": [{"function": {"name": "f", "arguments": "not json"}}]}
    assert ToolFormat(kind).for_template(broken) == broken
