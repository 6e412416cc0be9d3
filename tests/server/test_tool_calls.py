"""Calls of tools in answers: free, forced, and none."""

import json
from typing import Any

import httpx
import pytest
from tests.server.asked import CHAT, answer, body, chunks, error_of
from tests.server.conftest import Opened
from tests.server.scripted import ScriptedEngine
from tests.server.templates import HERMES, TAGS, bytes_with
from tests.server.templates import TOOLS as TOOL_TEMPLATES

pytestmark = pytest.mark.anyio
both = pytest.mark.parametrize("stream", [True, False])
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {"type": "object", "properties": {"year": {"type": "integer"}}},
    },
}
NAMED = {"type": "function", "function": {"name": "look_up"}}
WRITTEN = {
    "hermes": "<tool_call>{named}</tool_call>",
    "mistral": "[TOOL_CALLS][{named}]",
    "llama": "{named}",
    "tags": "<function=look_up><parameter=year>[{half}]</parameter></function>",
}
"A call in each format."
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"city": "Žatec"}}\n</tool_call>'


@pytest.fixture
def caller(opened: Opened) -> httpx.AsyncClient:
    """A client of a model that can call tools."""
    return opened(tokenizer=bytes_with(HERMES))


async def called(
    client: httpx.AsyncClient, stream: bool, **fields: Any
) -> tuple[str | None, list[dict[str, Any]], str]:
    """Content, calls and finish reason of an answer."""
    if not stream:
        choice = (await answer(client, CHAT, tools=[TOOL], **fields))["choices"][0]
        message = choice["message"]
        return message["content"], message.get("tool_calls", []), choice["finish_reason"]
    found = await chunks(client, CHAT, tools=[TOOL], **fields)
    deltas = [chunk["choices"][0]["delta"] for chunk in found]
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert [call.pop("index") for call in calls] == list(range(len(calls)))
    content = "".join(delta.get("content") or "" for delta in deltas) or None
    return content, calls, found[-1]["choices"][0]["finish_reason"]


@both
async def test_calls_are_told_from_content(
    caller: httpx.AsyncClient, engine: ScriptedEngine, stream: bool
) -> None:
    engine.text = f"Let me see.{CALL}{CALL}"
    content, calls, reason = await called(caller, stream)
    assert (content, reason) == ("Let me see.", "tool_calls")
    assert [call["type"] for call in calls] == ["function"] * 2
    assert len({call["id"] for call in calls}) == 2
    arguments = [json.loads(call["function"]["arguments"]) for call in calls]
    assert arguments == [{"city": "Žatec"}] * 2


@both
async def test_calls_in_tags_have_the_types_of_the_tool(
    opened: Opened, engine: ScriptedEngine, stream: bool
) -> None:
    values = "<parameter=city>\nŽatec\n</parameter>\n<parameter=year>\n1265\n</parameter>\n"
    engine.text = f"<tool_call>\n<function=look_up>\n{values}</function>\n</tool_call>"
    content, calls, reason = await called(opened(tokenizer=bytes_with(TAGS)), stream)
    assert (content, reason, len(calls)) == (None, "tool_calls", 1)
    arguments = json.loads(calls[0]["function"]["arguments"])
    assert arguments == {"city": "Žatec", "year": 1265}


async def test_a_tool_may_say_nothing_of_its_arguments(
    opened: Opened, engine: ScriptedEngine
) -> None:
    engine.text = (
        "<tool_call><function=wait><parameter=for>\n5\n</parameter></function></tool_call>"
    )
    tools = [{"type": "function", "function": {"name": "wait"}}]
    client = opened(tokenizer=bytes_with(TAGS))
    message = (await answer(client, CHAT, tools=tools))["choices"][0]["message"]
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"for": "5"}


@both
async def test_one_call_at_most_where_no_more_are_wanted(
    caller: httpx.AsyncClient, engine: ScriptedEngine, stream: bool
) -> None:
    engine.text = f"{CALL}\n{CALL}"
    content, calls, reason = await called(caller, stream, parallel_tool_calls=False)
    assert (content, len(calls), reason) == (None, 1, "tool_calls")


@both
async def test_an_answer_without_a_call_is_an_answer(
    caller: httpx.AsyncClient, engine: ScriptedEngine, stream: bool
) -> None:
    content, calls, reason = await called(caller, stream)
    assert (content, calls, reason) == (engine.text, [], "stop")


@both
async def test_without_a_choice_of_tools_text_stays_text(
    caller: httpx.AsyncClient, engine: ScriptedEngine, stream: bool
) -> None:
    engine.text = CALL
    content, calls, _ = await called(caller, stream, tool_choice="none")
    assert (content, calls) == (CALL, [])
    await answer(caller, CHAT)
    asked, plain = engine.submitted[-2:]
    assert (asked.token_ids, asked.sampling.grammar) == (plain.token_ids, None)


@both
async def test_a_named_tool_is_called(
    caller: httpx.AsyncClient, engine: ScriptedEngine, stream: bool
) -> None:
    engine.text = '{"city": "Žatec"}'
    content, calls, reason = await called(caller, stream, tool_choice=NAMED)
    assert (content, reason) == (None, "tool_calls")
    (call,) = calls
    assert call["function"] == {"name": "look_up", "arguments": engine.text}
    grammar = engine.submitted[-1].sampling.grammar
    assert json.loads(grammar.schema) == TOOL["function"]["parameters"]


@both
async def test_some_tool_is_called(
    caller: httpx.AsyncClient, engine: ScriptedEngine, stream: bool
) -> None:
    engine.text = '{"name": "look_up", "arguments": {"a": 1}}'
    _, calls, _ = await called(caller, stream, tool_choice="required")
    assert [call["function"] for call in calls] == [{"name": "look_up", "arguments": '{"a": 1}'}]


@pytest.mark.parametrize("choice", [None, "auto", "required", NAMED])
@pytest.mark.parametrize(
    "wanted",
    [
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}},
    ],
)
async def test_calls_and_a_format_of_the_answer_are_not_to_be_had_together(
    caller: httpx.AsyncClient, choice: Any, wanted: Any
) -> None:
    request = body(CHAT, tools=[TOOL], tool_choice=choice, response_format=wanted)
    assert error_of(await caller.post(CHAT, json=request), 400)["param"] == "response_format"
    await answer(caller, CHAT, tools=[TOOL], tool_choice="none", response_format=wanted)
    await answer(caller, CHAT, tools=[], response_format=wanted)
    await answer(caller, CHAT, tools=[TOOL], response_format={"type": "text"})


@both
@pytest.mark.parametrize("template", TOOL_TEMPLATES)
@pytest.mark.parametrize("choice", ["auto", "required", NAMED])
async def test_half_a_character_in_a_call_may_be_told_and_sent_back(
    opened: Opened, engine: ScriptedEngine, stream: bool, template: str, choice: Any
) -> None:
    half = '{"city": "\\ud83d"}'
    named = f'{{"name": "look_up", "arguments": {half}}}'
    engine.text = half if choice == NAMED else named
    if choice == "auto":
        engine.text = WRITTEN[template].format(half=half, named=named)
    client = opened(tokenizer=bytes_with(TOOL_TEMPLATES[template]))
    _, calls, reason = await called(client, stream, tool_choice=choice)
    assert (len(calls), reason) == (1, "tool_calls")
    told = {"role": "assistant", "tool_calls": calls}
    result = {"role": "tool", "tool_call_id": calls[0]["id"], "content": "none"}
    request = body(CHAT, tools=[TOOL])
    request["messages"] += [told, result]
    response = await client.post(CHAT, json=request)
    assert response.status_code == 200, response.text


@both
@pytest.mark.parametrize("name", ["look up it", "\\ud83d"])
@pytest.mark.parametrize("choice", ["auto", "required"])
async def test_a_call_that_could_not_be_sent_back_is_content(
    caller: httpx.AsyncClient, engine: ScriptedEngine, stream: bool, name: str, choice: str
) -> None:
    made = f'{{"name": "{name}", "arguments": {{}}}}'
    engine.text = made if choice == "required" else f"<tool_call>{made}</tool_call>"
    content, calls, reason = await called(caller, stream, tool_choice=choice)
    assert (content, calls, reason) == (engine.text, [], "stop")


async def test_an_unknown_tool_is_refused(caller: httpx.AsyncClient) -> None:
    choice = {"type": "function", "function": {"name": "other"}}
    request = body(CHAT, tools=[TOOL], tool_choice=choice)
    assert error_of(await caller.post(CHAT, json=request), 400)["param"] == "tool_choice"


@pytest.mark.parametrize("choice", [None, "auto", "required", NAMED])
async def test_tools_need_a_template_that_knows_them(
    client: httpx.AsyncClient, choice: Any
) -> None:
    request = body(CHAT, tools=[TOOL], tool_choice=choice)
    assert error_of(await client.post(CHAT, json=request), 400)["param"] == "tools"


@both
@pytest.mark.parametrize("choice", ["auto", "required"])
async def test_control_tokens_are_no_content(
    caller: httpx.AsyncClient, engine: ScriptedEngine, stream: bool, choice: str
) -> None:
    """Tokens that write calls are shown to the parser, the others to nobody."""
    engine.text = "<|system|>One<|bos|> and<|user|> two"
    content, calls, _ = await called(caller, stream, tool_choice=choice)
    assert (content, calls) == ("One and two", [])
