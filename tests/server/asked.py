"""Requests and answers, as most tests of the server want them."""

import json
from typing import Any

import httpx

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ENDPOINTS = (CHAT, COMPLETIONS)


def body(url: str, text: str = "When was the bridge built?", **fields: Any) -> dict[str, Any]:
    """A request with one text."""
    if url == CHAT:
        return {"messages": [{"role": "user", "content": text}], **fields}
    return {"prompt": text, **fields}


async def answer(client: httpx.AsyncClient, url: str, **fields: Any) -> dict[str, Any]:
    """A plain answer."""
    response = await client.post(url, json=body(url, **fields))
    assert response.status_code == 200, response.text
    return response.json()


async def chunks(client: httpx.AsyncClient, url: str, **fields: Any) -> list[dict[str, Any]]:
    """All chunks of a stream, which must end as it should."""
    response = await client.post(url, json=body(url, stream=True, **fields))
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return events(response.text)


def events(text: str) -> list[dict[str, Any]]:
    """The events of a stream without its last one."""
    assert text.endswith("data: [DONE]\n\n")
    lines = [line for line in text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def text_of(choice: dict[str, Any]) -> str:
    """The text of a choice of an answer or a chunk."""
    if "text" in choice:
        return choice["text"]
    return choice.get("message", choice.get("delta"))["content"] or ""


def pieces(found: list[dict[str, Any]], index: int = 0) -> list[str]:
    """Texts of one choice, in order."""
    all_choices = [choice for chunk in found for choice in chunk["choices"]]
    return [
        text
        for choice in all_choices
        if choice["index"] == index
        and (text := choice.get("text", choice.get("delta", {}).get("content")))
    ]


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error of a refused request, in OpenAI's shape."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    found = response.json()
    assert set(found) == {"error"}
    assert set(found["error"]) == {"message", "type", "param", "code"}
    assert found["error"]["message"]
    return found["error"]
