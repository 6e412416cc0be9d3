"""From tokens to pieces, whatever the steps, the stop strings and the end."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.server.scripted import TOKENIZER

from redknot.engine.messages import Ended, SamplingSpec, Submit, TokenInfo
from redknot.server.choice import Choice, Finished, Job, Piece
from redknot.server.forced import ForcedCall, call_grammar
from redknot.server.schema.chat import Tool
from redknot.server.tools import ToolCall

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


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"name": 1}', "null", '"a"'])
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


def test_a_due_call_may_be_of_any_tool() -> None:
    shapes = json.loads(call_grammar(TOOLS, None).schema)["anyOf"]
    assert [shape["properties"]["name"]["const"] for shape in shapes] == ["one", "two"]
    assert all(shape["additionalProperties"] is False for shape in shapes)
