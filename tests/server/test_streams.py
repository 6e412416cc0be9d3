"""Streams: usage, stop strings, whole characters, errors in the middle."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest
from tests.server.asked import (
    CHAT,
    ENDPOINTS,
    answer,
    body,
    chunks,
    error_of,
    events,
    pieces,
    text_of,
)
from tests.server.scripted import TOKENIZER, ScriptedEngine

from redknot.engine.client import Event
from redknot.engine.messages import Produced, Submit
from redknot.server.auth import Keyring
from redknot.server.guard import Guard

pytestmark = pytest.mark.anyio
TEXT = ScriptedEngine().text
both = pytest.mark.parametrize("url", ENDPOINTS)


@both
@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"include_usage": True}, True),
        ({"include_usage": False}, False),
        ({}, False),
        (None, False),
    ],
)
async def test_usage_comes_once_and_last_where_it_is_asked_for(
    http: httpx.AsyncClient, url: str, options: dict[str, bool] | None, wanted: bool
) -> None:
    """SV-01."""
    found = await chunks(http, url, stream_options=options, max_tokens=5, ignore_eos=True)
    told = [chunk for chunk in found if "usage" in chunk]
    assert told == (found[-1:] if wanted else [])
    if wanted:
        assert found[-1]["choices"] == []
        assert found[-1]["usage"]["completion_tokens"] == 5
    assert all(chunk["choices"] for chunk in found[: len(found) - wanted])
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in found}) == 1


@both
@pytest.mark.parametrize("size", [1, 3, 9])
@pytest.mark.parametrize("per_step", [1, 4])
async def test_a_stop_string_never_shows(
    client: httpx.AsyncClient, engine: ScriptedEngine, url: str, size: int, per_step: int
) -> None:
    """SV-02: tokens are single bytes here."""
    engine.per_step = per_step
    stop = TEXT[11 : 11 + size]
    streamed = await chunks(client, url, stop=[stop, "\x00"])
    plain = await answer(client, url, stop=stop)
    expected = TEXT[: TEXT.index(stop)]
    assert "".join(pieces(streamed)) == text_of(plain["choices"][0]) == expected
    assert plain["choices"][0]["finish_reason"] == "stop"
    assert streamed[-1]["choices"][0]["finish_reason"] == "stop"
    assert plain["usage"]["completion_tokens"] == TEXT.index(stop) + size
    await asyncio.sleep(0.01)
    cancelled = {request_id for request_id, _ in engine.cancelled}
    assert cancelled == {request.request_id for request in engine.submitted}


@both
async def test_characters_come_whole(client: httpx.AsyncClient, url: str) -> None:
    """SV-04: of four bytes and of two, one byte a token."""
    found = pieces(await chunks(client, url))
    assert "".join(found) == TEXT
    assert len(found) == len(TEXT)
    assert "\ufffd" not in "".join(found)


@both
@pytest.mark.parametrize("per_step", [1, 2, 7, 1000])
async def test_joined_stream_is_the_plain_answer(
    client: httpx.AsyncClient, engine: ScriptedEngine, url: str, per_step: int
) -> None:
    engine.per_step = per_step
    found = await chunks(client, url, n=2, max_tokens=30, seed=1)
    plain = await answer(client, url, n=2, max_tokens=30, seed=1)
    for index, choice in enumerate(plain["choices"]):
        assert choice["index"] == index
        assert "".join(pieces(found, index)) == text_of(choice)
        assert choice["finish_reason"] == "length"
    ends = [choice for chunk in found for choice in chunk["choices"] if choice["finish_reason"]]
    assert sorted(choice["index"] for choice in ends) == [0, 1]
    assert plain["usage"]["completion_tokens"] == 60


async def test_a_chat_stream_begins_with_the_role(http: httpx.AsyncClient) -> None:
    found = await chunks(http, ENDPOINTS[0], max_tokens=2)
    assert found[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all("role" not in chunk["choices"][0]["delta"] for chunk in found[1:])
    assert {chunk["object"] for chunk in found} == {"chat.completion.chunk"}


@both
async def test_one_choice_that_is_stopped_lets_the_others_go_on(
    client: httpx.AsyncClient, engine: ScriptedEngine, url: str
) -> None:
    engine.ends = False
    found = await answer(client, url, n=3, max_tokens=40, stop=["bridge"])
    assert [text_of(choice) for choice in found["choices"]] == ["The "] * 3
    (request,) = engine.submitted
    told = [choice for name, choice in engine.cancelled if name == request.request_id]
    assert told[:2] == [0, 1]


@both
async def test_a_stop_token_is_no_text_and_an_ignored_end_token_ends_nothing(
    client: httpx.AsyncClient, engine: ScriptedEngine, url: str
) -> None:
    found = await answer(client, url, stop_token_ids=[engine_token(".")])
    assert text_of(found["choices"][0]) == TEXT[: TEXT.index(".")]
    assert found["choices"][0]["finish_reason"] == "stop"
    assert found["usage"]["completion_tokens"] == TEXT.index(".") + 1
    found = await answer(client, url, ignore_eos=True, max_tokens=200)
    assert text_of(found["choices"][0]).startswith(TEXT * 2)
    assert found["choices"][0]["finish_reason"] == "length"


@both
async def test_a_stop_token_that_did_not_stop_is_text(
    client: httpx.AsyncClient, engine: ScriptedEngine, url: str
) -> None:
    """The last token is held back while it may be the end, then told."""
    limit = TEXT.index(".") + 1
    engine.per_step = 1000
    found = await answer(client, url, stop_token_ids=[engine_token("!")], max_tokens=limit)
    assert text_of(found["choices"][0]) == TEXT[:limit]


@both
async def test_an_error_in_the_middle_is_an_event(
    client: httpx.AsyncClient, engine: ScriptedEngine, url: str
) -> None:
    engine.fail_after = 3
    found = await chunks(client, url)
    assert "".join(pieces(found[:-1])) == TEXT[:3]
    assert found[-1]["error"]["code"] == "generation_failed"
    assert found[-1]["error"]["message"] == "out of luck"
    error = error_of(await client.post(url, json=body(url)), 500)
    assert error["type"] == "server_error"


@both
async def test_an_engine_that_ends_in_the_middle_is_told(
    client: httpx.AsyncClient, engine: ScriptedEngine, url: str
) -> None:
    engine.pause = 0.01
    asked = asyncio.create_task(client.post(url, json=body(url, stream=True)))
    plain = asyncio.create_task(client.post(url, json=body(url)))
    await asyncio.sleep(0.1)
    engine.gone.set()
    assert events((await asked).text)[-1]["error"]["code"] == "engine_gone"
    error_of(await plain, 503)


FAULTS = [RuntimeError, KeyError, ValueError, TypeError, RecursionError, MemoryError, OSError]


@both
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_fault_in_the_middle_is_an_event_whatever_it_is(
    client: httpx.AsyncClient,
    engine: ScriptedEngine,
    caplog: pytest.LogCaptureFixture,
    url: str,
    fault: type[Exception],
) -> None:
    """And its message, which may hold the answer, is told to nobody."""
    engine.submit = failing(engine, fault("a secret"))
    found = await chunks(client, url)
    assert "".join(pieces(found[:-1])) == TEXT[:3]
    assert found[-1]["error"]["code"] == "internal_error"
    assert found[-1]["error"]["type"] == "server_error"
    (told,) = [one for one in caplog.records if one.getMessage() == "internal error"]
    assert told.fields["path"] == url
    assert told.fields["error"][0] == fault.__name__
    assert told.fields["error"][-1].endswith(" failing.<locals>.submit")
    assert "a secret" not in str(found) + str(told.fields) + caplog.text


async def test_a_client_is_sent_nothing_that_cannot_be_written(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault of the rendering of chunks, not of the engine."""
    monkeypatch.setattr("redknot.server.completions.name", lambda *_: 1 / 0)
    found = await chunks(client, ENDPOINTS[1], logprobs=1)
    assert found[-1]["error"]["code"] == "internal_error"


@pytest.mark.parametrize("begun", [True, False])
async def test_a_fault_outside_of_all_routes_is_answered_unless_something_was(
    caplog: pytest.LogCaptureFixture, begun: bool
) -> None:
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if begun:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ValueError("a secret")

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": []}
    with caplog.at_level(logging.INFO, "redknot.server"):
        await Guard(app, keyring=Keyring(()), max_concurrent=1)(scope, None, send)
    started = [message for message in sent if message["type"] == "http.response.start"]
    assert [message["status"] for message in started] == [200 if begun else 500]
    assert "x-request-id" in {key.decode() for key, _ in started[0]["headers"]}
    assert len(sent) == (1 if begun else 2)
    assert [one.getMessage() for one in caplog.records] == ["internal error", "request"]
    assert "a secret" not in caplog.text + str(sent)


@both
@pytest.mark.parametrize("stream", [True, False])
async def test_a_refusal_comes_before_the_stream(
    client: httpx.AsyncClient, engine: ScriptedEngine, url: str, stream: bool
) -> None:
    engine.capacity = 0
    response = await client.post(url, json=body(url, stream=stream))
    assert error_of(response, 429)["code"] == "queue_full"
    assert int(response.headers["retry-after"]) >= 1


@both
async def test_the_report_comes_with_the_answer(client: httpx.AsyncClient, url: str) -> None:
    plain = await answer(client, url, redknot={"policy": "reuse"})
    assert plain["redknot"]["policy"] == "reuse"
    assert plain["redknot"]["seconds"]["probe"] == 0.002
    found = await chunks(client, url, redknot={"report": True})
    assert [chunk for chunk in found if "redknot" in chunk] == found[-1:]
    assert "redknot" not in await answer(client, url)
    assert "redknot" not in await answer(client, url, redknot={"report": False})


def failing(engine: ScriptedEngine, fault: Exception) -> Any:
    """The engine's `submit`, which raises ``fault`` behind three tokens."""
    original = engine.submit

    async def submit(request: Submit) -> AsyncGenerator[Event, None]:
        left = 3
        async for event in original(request):
            yield event
            left -= isinstance(event, Produced)
            if not left:
                raise fault

    return submit


def engine_token(char: str) -> int:
    return TOKENIZER(char, add_special_tokens=False).input_ids[0]
