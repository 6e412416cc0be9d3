"""From tokens to pieces, whatever the steps, the stop strings and the end."""

import json
from functools import partial
from itertools import pairwise
from typing import Any

import llguidance
import llguidance.hf
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.server.scripted import TOKENIZER

from redknot.engine.messages import Ended, SamplingSpec, Submit, TokenInfo
from redknot.engine.sampling import SPACING
from redknot.server.choice import Choice, Finished, Job, Piece
from redknot.server.forced import ForcedCall, call_grammar
from redknot.server.schema.chat import Tool
from redknot.server.tools import ToolCall, ToolFormat, ToolParser

END = TOKENIZER.eos_token_id
texts = st.text(alphabet="ab🙂ž ", min_size=1, max_size=20)
TOOLS = [
    Tool.model_validate({"type": "function", "function": {"name": name}}) for name in ("one", "two")
]


def run(
    text: str, cuts: set[int], stop: tuple[str, ...], ended_by: int | None
) -> tuple[list[Piece], Finished]:
    """Feed ``text`` cut into steps, with log-probabilities, then its end."""
    ids = TOKENIZER(text, add_special_tokens=False).input_ids
    ids += [] if ended_by is None else [ended_by]
    sampling = SamplingSpec(max_tokens=99, logprobs=0)
    request = Submit(request_id="a", token_ids=[], probe=(0, 0), sampling=sampling, arrived=0.0)
    choice = Choice(Job(request=request, stop=stop), 0, TOKENIZER, frozenset({END, 97}))
    borders = sorted({0, len(ids), *(cut for cut in cuts if cut < len(ids))})
    found: list[Piece | Finished] = []
    for start, end in pairwise(borders):
        if not choice.done:
            found += choice.add(tuple(TokenInfo(token, -1.0) for token in ids[start:end]))
    if not choice.done:
        reason = "length" if ended_by is None else "stop"
        found += choice.end(Ended(request_id="a", reason=reason, stop_token=ended_by))
    *pieces, finished = found
    assert isinstance(finished, Finished)
    assert all(isinstance(piece, Piece) for piece in pieces)
    return pieces, finished


@given(texts, st.sets(st.integers(1, 80)), st.lists(texts, max_size=2), st.booleans())
def test_pieces_join_to_the_text_before_the_first_stop(
    text: str, cuts: set[int], stops: list[str], ends: bool
) -> None:
    pieces, finished = run(text, cuts, tuple(stops), END if ends else None)
    complete = {stop: text.find(stop) + len(stop) for stop in stops if stop in text}
    joined = "".join(str(piece.content) for piece in pieces)
    if complete:
        first = min(complete.values())
        shown = min(text[:first].find(stop) for stop in stops if stop in text[:first])
        assert joined == text[:shown]
        assert finished.num_tokens == len(text[:first].encode())
    else:
        assert joined == text
        assert finished.num_tokens == len(text.encode()) + ends
    assert finished.reason == ("stop" if ends or complete else "length")
    told = [TOKENIZER.decode([token.token_id]) for piece in pieces for _, token in piece.logprobs]
    assert len(told) == len(joined.encode())
    assert "".join(one for one in told if "\ufffd" not in one) == "".join(
        char for char in joined if char.isascii()
    )


@pytest.mark.parametrize(
    "rest", ["<", "</tool", "\n<tool_call", "\n<tool_call>{", "</tool_call> a"]
)
@pytest.mark.parametrize("logprobs", [None, 0])
def test_nothing_follows_the_only_call(rest: str, logprobs: int | None) -> None:
    """A stop string that does not come holds text back, which then comes at once."""
    sampling = SamplingSpec(max_tokens=99, logprobs=logprobs)
    request = Submit(request_id="a", token_ids=[], probe=(0, 0), sampling=sampling, arrived=0.0)
    parser = partial(ToolParser, ToolFormat("hermes"), {})
    job = Job(request=request, stop=(f"}}}}{rest[:-1]}\0",), parser=parser, single_call=True)
    choice = Choice(job, 0, TOKENIZER, frozenset({END}))
    text = f'a<tool_call>{{"name": "one", "arguments": {{}}}}{rest} and so on'
    ids = TOKENIZER(text, add_special_tokens=False).input_ids
    *pieces, finished = choice.add(tuple(TokenInfo(token, -1.0) for token in ids))
    assert isinstance(finished, Finished)
    assert finished.reason == "tool_calls"
    told = [piece.content for piece in pieces if isinstance(piece, Piece) and piece.content]
    assert told[0] == "a"
    assert [type(one) for one in told] == [str, ToolCall]


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "{}", '{"name": 1}', "null", '"a"', '{"name": "one"}', "[" * 9999),
        *('{"name": "one", "arguments": 1}', '{"name": "one", "arguments": {"a": 1e999}}'),
        *('{"name": "look up it", "arguments": {}}', '{"name": "\\ud83d", "arguments": {}}'),
    ],
)
def test_a_forced_call_that_was_cut_off_is_content(text: str) -> None:
    parser = ForcedCall(None)
    assert parser.feed(text) == []
    assert parser.finish() == ([text] if text else [])


def test_a_forced_call_that_is_whole_is_a_call() -> None:
    parser = ForcedCall(None)
    for part in ('{"name": "two", "argum', 'ents": {"a": 1}}'):
        assert parser.feed(part) == []
    (call,) = parser.finish()
    assert isinstance(call, ToolCall)
    assert (call.name, json.loads(call.arguments)) == ("two", {"a": 1})


@pytest.mark.parametrize("text", ["", '{"a": "b', '{"a": 1}', "[" * 9999])
def test_a_named_tool_is_called_even_if_its_arguments_were_cut_off(text: str) -> None:
    parser = ForcedCall("one")
    parser.feed(text)
    (call,) = parser.finish()
    assert isinstance(call, ToolCall)
    assert (call.name, call.arguments) == ("one", text)


@pytest.mark.parametrize("half", ["\\ud83d", "\\ude00 \\ud83d"])
def test_half_a_character_in_a_forced_call_can_be_sent(half: str) -> None:
    parser = ForcedCall(None)
    parser.feed(f'{{"name": "one", "arguments": {{"a": "{half} ž"}}}}')
    (call,) = parser.finish()
    assert isinstance(call, ToolCall)
    assert call.arguments.encode()
    assert json.loads(call.arguments) == json.loads(f'{{"a": "{half} ž"}}')


POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "next": {"$ref": "#/$defs/Point"}},
    "required": ["x"],
    "additionalProperties": False,
}
LINE = {
    "$defs": {"Point": POINT, "$ref": {"type": "integer"}},
    "type": "object",
    "properties": {
        "start": {"$ref": "#/$defs/Point"},
        "$ref": {"anyOf": [{"$ref": "#/$defs/$ref"}, {"type": "null"}]},
        "kind": {"const": {"$ref": "#/$defs/Point"}},
    },
    "required": ["start"],
    "additionalProperties": False,
}
TREE = {
    "type": "object",
    "properties": {"child": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
    "required": ["child"],
    "additionalProperties": False,
}
HOME = {"$id": "https://example.com/home", "$ref": "#/$defs/Point", "$defs": {"Point": POINT}}
CHECKED = [
    ("line", LINE, '{"start": {"x": 1, "next": {"x": 2}}}', True),
    ("line", LINE, '{"start": {"x": 1, "next": {"x": "2"}}}', False),
    ("line", LINE, '{"start": {"x": 1}, "$ref": 5}', True),
    ("line", LINE, '{"start": {"x": 1}, "$ref": "5"}', False),
    ("line", LINE, '{"start": {"x": 1}, "kind": {"$ref": "#/$defs/Point"}}', True),
    (
        "old",
        {"definitions": {"P": POINT | {"properties": {"x": {}}}}, "$ref": "#/definitions/P"},
        '{"x": "any"}',
        True,
    ),
    ("tree", TREE, '{"child": {"child": null}}', True),
    ("tree", TREE, '{"child": {"name": "tree"}}', False),
    ("home", HOME, '{"x": 1}', True),
    ("home", HOME, '{"x": null}', False),
]


@pytest.mark.parametrize(("name", "parameters", "arguments", "right"), CHECKED)
def test_a_due_call_follows_the_references_in_the_schemas_of_tools(
    name: str, parameters: dict[str, Any], arguments: str, right: bool
) -> None:
    function = {"name": name, "parameters": parameters}
    tools = [*TOOLS, Tool.model_validate({"type": "function", "function": function})]
    schema = call_grammar(tools, None).schema
    compiled = llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=SPACING)
    matcher = llguidance.LLMatcher(llguidance.hf.from_tokenizer(TOKENIZER), compiled)
    assert not matcher.is_error(), matcher.get_error()
    text = f'{{"name": "{name}", "arguments": {arguments}}}'
    ids = TOKENIZER(text, add_special_tokens=False).input_ids
    taken = matcher.try_consume_tokens(ids)
    assert (taken == len(ids) and matcher.is_accepting()) == right


def test_a_due_call_may_be_of_any_tool() -> None:
    shapes = json.loads(call_grammar(TOOLS, None).schema)["anyOf"]
    assert [shape["properties"]["name"]["const"] for shape in shapes] == ["one", "two"]
    assert all(shape["additionalProperties"] is False for shape in shapes)
