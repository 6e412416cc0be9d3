"""Answers of a real server: text, ends, company, and input of every form."""

import asyncio
import json
import random
from typing import Any

import httpx
import pytest
from tests.server.asked import CHAT, COMPLETIONS, ENDPOINTS, answer, body, chunks, pieces, text_of
from tests.server.running import NEVER_TEXT, Running

pytestmark = pytest.mark.anyio
both = pytest.mark.parametrize("url", ENDPOINTS)
WORDS = "🙂 Příliš žluťoučký kůň úpěl ďábelské ódy. The bridge was built in 1904."


def forced(words: str = WORDS) -> dict[str, Any]:
    """A format that leaves one answer: ``words`` as JSON."""
    schema = {"name": "words", "schema": {"const": words}}
    return {"response_format": {"type": "json_schema", "json_schema": schema}, "max_tokens": 200}


@pytest.fixture
def client(real: Running) -> httpx.AsyncClient:
    return real.client()


async def test_characters_come_whole(client: httpx.AsyncClient) -> None:
    """SV-04: tokens are single bytes."""
    found = pieces(await chunks(client, CHAT, **forced()))
    assert json.loads("".join(found)) == WORDS
    assert "\ufffd" not in "".join(found)
    assert all(len(piece) == 1 for piece in found)
    plain = await answer(client, CHAT, **forced())
    assert text_of(plain["choices"][0]) == "".join(found)


@pytest.mark.parametrize("size", [1, 3, 9])
@pytest.mark.parametrize("at", [3, 20, 50])
async def test_a_stop_string_never_shows(client: httpx.AsyncClient, at: int, size: int) -> None:
    """SV-02."""
    whole = json.dumps(WORDS, ensure_ascii=False)
    stop = whole[at : at + size]
    streamed = await chunks(client, CHAT, stop=[stop, "\x00"], **forced())
    plain = await answer(client, CHAT, stop=stop, **forced())
    expected = whole[: whole.index(stop)]
    assert "".join(pieces(streamed)) == text_of(plain["choices"][0]) == expected
    assert plain["choices"][0]["finish_reason"] == "stop"
    assert streamed[-1]["choices"][0]["finish_reason"] == "stop"
    used = plain["usage"]["completion_tokens"]
    assert used == len((expected + stop).encode())


async def test_every_end_token_ends(client: httpx.AsyncClient) -> None:
    """SV-13: three of the config and one of the generation config."""
    request = {
        "prompt": "Once",
        "temperature": 2,
        "logprobs": 0,
        "n": 4,
        "max_tokens": 300,
    }
    names = {f"bytes:\\x{0xFF - at:02x}" for at in range(3)} | {"<|end|>"}
    assert len(names) == len(NEVER_TEXT) + 1
    seen = set()
    for seed in range(0, 400, 4):
        free = await create(client, seed=seed, ignore_eos=True, **request)
        ends = await create(client, seed=seed, **request)
        for one, other in zip(free["choices"], ends["choices"], strict=True):
            tokens = one["logprobs"]["tokens"]
            first = next((at for at, name in enumerate(tokens) if name in names), None)
            if first is None:
                assert other["finish_reason"] == "length"
                continue
            assert other["finish_reason"] == "stop"
            assert other["logprobs"]["tokens"] == tokens[:first]
            seen.add(tokens[first])
        if seen == names:
            return
    pytest.fail(f"only {seen} came up")


async def create(client: httpx.AsyncClient, **request: Any) -> dict[str, Any]:
    """A completion, once there is room for it."""
    for _ in range(200):
        response = await client.post(COMPLETIONS, json=request)
        if response.status_code != 429:
            assert response.status_code == 200, response.text
            return response.json()
        await asyncio.sleep(0.05)
    raise AssertionError("there was never room")


async def test_company_changes_nothing(client: httpx.AsyncClient) -> None:
    """SV-20: 8 prompts one after another and together, in float32."""
    draw = random.Random(5)
    requests = [
        {
            "prompt": "".join(draw.choices("abcdef \n", k=draw.randint(5, 300))),
            "temperature": 0.8 * (at % 2),
            "seed": at,
            "max_tokens": draw.randint(1, 60),
            "logprobs": 0,
            "ignore_eos": True,
            "redknot": {"policy": "dense"},
        }
        for at in range(8)
    ]
    alone = [await create(client, **request) for request in requests]
    together = await asyncio.gather(*(create(client, **request) for request in requests))
    for one, other in zip(alone, together, strict=True):
        tokens = [found["choices"][0]["logprobs"]["tokens"] for found in (one, other)]
        assert tokens[0] == tokens[1]


TURNS = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi"},
    {"role": "user", "content": "Who are you?"},
    {"role": "assistant", "content": "A bridge."},
    {"role": "user", "content": "Since when?"},
]


async def test_lists_of_texts_are_as_strings(client: httpx.AsyncClient) -> None:
    """SV-18: over three turns, twice."""
    listed = [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in TURNS]
    found = []
    for messages in (TURNS, listed, listed):
        request = {"messages": messages, "temperature": 0, "max_tokens": 9, "ignore_eos": True}
        response = await client.post(CHAT, json=request)
        assert response.status_code == 200, response.text
        made = response.json()
        found.append((text_of(made["choices"][0]), made["usage"]["prompt_tokens"]))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("content", ["", None, []])
async def test_an_empty_answer_is_a_turn(client: httpx.AsyncClient, content: Any) -> None:
    """SV-19."""
    messages = [TURNS[1], {"role": "assistant", "content": content}, TURNS[3]]
    response = await client.post(CHAT, json={"messages": messages, "max_tokens": 2})
    assert response.status_code == 200, response.text


@both
async def test_a_limit_may_be_left_out_or_null(client: httpx.AsyncClient, url: str) -> None:
    """SV-06: then the context is the limit; what may not be is refused in test_bad_requests."""
    for fields in ({}, {"max_tokens": None}):
        found = await client.post(url, json=body(url, "a" * 960, ignore_eos=True, **fields))
        assert found.status_code == 200, found.text
        assert found.json()["choices"][0]["finish_reason"] == "length"
        assert found.json()["usage"]["total_tokens"] == 1024
