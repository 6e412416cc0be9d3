"""Broken requests against a running server: nothing but 2xx and 4xx, and no page left behind.

redknot serve MODEL --port 8000
python benchmarks/fuzz_server.py http://127.0.0.1:8000 --count 10000
"""

import argparse
import asyncio
import collections
import copy
import json
import random
import time
from collections.abc import Callable
from typing import Any

import httpx

CHAT, COMPLETIONS, SEGMENTS = "/v1/chat/completions", "/v1/completions", "/v1/segments"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
PART = {"type": "text", "text": "The bridge. " * 9, "cache_control": {"type": "ephemeral"}}
USER = {"role": "user", "content": [PART, {"type": "text", "text": "When?"}]}
CHATS: list[dict[str, Any]] = [
    {"messages": [{"role": "system", "content": "Be short."}, USER], "temperature": 0, "n": 2},
    {"messages": [USER], "documents": [{"title": "a", "text": "long " * 40}], "redknot": {}},
    {"messages": [USER], "tools": [TOOL], "tool_choice": "required", "seed": 3},
    {"messages": [USER], "response_format": FORMAT, "logprobs": True, "top_logprobs": 3},
    {"messages": [USER], "stop": ["a", "bc"], "stream": True, "stream_options": {}},
    {"messages": [USER, {"role": "assistant", "content": None}, USER], "top_p": 0.5},
]
TEXTS: list[dict[str, Any]] = [
    {"prompt": "Once upon a time", "echo": True, "best_of": 1},
    {"prompt": [[65, 66, 67], [68]], "logprobs": 2, "ignore_eos": True},
    {"prompt": ["a", "b"], "n": 3, "stop_token_ids": [5], "redknot": {"policy": "dense"}},
]
KEPT: list[dict[str, Any]] = [
    {"text": "The bridge was built in 1904. " * 3, "title": "bridge"},
    {"documents": [{"text": "one " * 20}, {"text": "two " * 20, "title": "b"}]},
]
VALID = [(CHAT, one) for one in CHATS] + [(COMPLETIONS, one) for one in TEXTS]
VALID += [(SEGMENTS, one) for one in KEPT]
JUNK: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 1.5, -0.0, 1e308, 2**31, 2**63, 2**64, 10**40, -(10**40)),
    *(
        "",
        " ",
        "a",
        "\x00",
        "\ufffd\uffff",
        "\U0001f642" * 50,
        "e\u0301\u202e\u200d",
        "<|end|>" * 9,
    ),
    *("%s%n", "../../etc/passwd", "x" * 5000, "{{ 7 * 7 }}", "NaN", "\r\n\r\n", "[TOOL_CALLS]["),
    *([], [[]], [None], {}, {"": ""}, {"type": "text"}, {"role": "user"}, [0] * 300, ["a"] * 40),
    *({"type": "object", "properties": {"a": {"$ref": "#"}}}, {"pattern": "(a+)+$"}),
]
TYPES = ("application/json", "text/plain", "application/x-ndjson", "", "application/json; x=\xe9")


def limited(body: Any) -> Any:
    """Keep answers short, so that the time goes into requests."""
    if isinstance(body, dict) and not {"text", "documents"} >= set(body):
        body.setdefault("max_tokens", 3)
    return body


def places(value: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Every place in ``value``: a container and its key."""
    keys = (
        value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    )
    for key in list(keys):
        found.append((value, key))
        places(value[key], found)
    return found


def mutated(body: Any, draw: random.Random) -> Any:
    """``body`` with up to three changes, mostly one."""
    body = copy.deepcopy(body)
    for _ in range(draw.choice([0, 1, 1, 1, 2, 3])):
        spots = places(body, [])
        if not spots:
            break
        holder, key = draw.choice(spots)
        kind = draw.randrange(5)
        if kind == 0:
            del holder[key]
        elif kind == 1 and isinstance(holder, dict):
            holder[draw.choice(["salt", "x" * 99, "n", "prompt", "messages", key + "\u0000"])] = (
                draw.choice(JUNK)
            )
        elif kind == 2:
            holder[key] = [holder[key]] * draw.choice([1, 3, 20])
        elif kind == 3 and isinstance(holder[key], str):
            at = draw.randint(0, len(holder[key]))
            holder[key] = holder[key][:at] + str(draw.choice(JUNK)) + holder[key][at:]
        else:
            holder[key] = copy.deepcopy(draw.choice(JUNK))
    return body


def request(draw: random.Random) -> tuple[str, bytes, dict[str, str]]:
    """Path, body and headers of one bad, or not quite bad, request."""
    path, body = draw.choice(VALID)
    data = json.dumps(mutated(limited(copy.deepcopy(body)), draw)).encode()
    kind = TYPES[0]
    fault = draw.randrange(18)
    if fault == 0:
        data = data[: draw.randrange(len(data) + 1)]
    elif fault == 1:
        at = draw.randrange(len(data))
        data = data[:at] + draw.randbytes(draw.randint(1, 4)) + data[at + 1 :]
    elif fault == 2:
        depth = draw.choice([10, 63, 64, 65, 1000, 50_000])
        data = data[:-1] + b', "user": ' + b"[" * depth + b"]" * depth + b"}"
    elif fault == 3:
        data = data[:-1] + b', "max_tokens": 3, "max_tokens": 4}'
    elif fault == 4:
        kind = draw.choice(TYPES[1:])
    elif fault == 5:
        path = draw.choice(
            [CHAT, COMPLETIONS, SEGMENTS, f"{SEGMENTS}/batch", "/v1/models", "/v1/x"]
        )
    return path, data, {"content-type": kind}


async def fuzz(
    client: httpx.AsyncClient, count: int, seed: int, at_once: int = 3
) -> tuple[dict[int, int], list[str]]:
    """Answers by status, and what must not be: 5xx, no answer, an error in another shape."""
    statuses: dict[int, int] = collections.Counter()
    wrong: list[str] = []
    draws = iter(range(count))

    async def work() -> None:
        for number in draws:
            path, data, headers = request(random.Random(seed * 1_000_003 + number))
            try:
                response = await client.post(path, content=data, headers=encoded(headers))
            except httpx.HTTPError as error:
                wrong.append(f"{number}: {path} {data[:300]!r}: {error!r}")
                continue
            statuses[response.status_code] += 1
            if response.status_code >= 400 and not shaped(response):
                told = response.text[:200]
                wrong.append(f"{number}: {path} {data[:300]!r}: {response.status_code} {told}")

    await asyncio.gather(*(work() for _ in range(at_once)))
    return dict(sorted(statuses.items())), wrong


def encoded(headers: dict[str, str]) -> dict[str, bytes]:
    """Bytes, because a header may be none that a client would send."""
    return {name: value.encode("latin-1") for name, value in headers.items()}


def shaped(response: httpx.Response) -> bool:
    """Whether it is the client's error, told as OpenAI's clients read them."""
    try:
        if response.status_code >= 500:
            return False
        return set(response.json()["error"]) == {"message", "type", "param", "code"}
    except (ValueError, KeyError, TypeError):
        return False


async def settled(live: Callable[[], Any], seconds: float = 30) -> dict[str, Any]:
    """What the live page says once nobody runs and nothing is built, or when time is up."""
    until, told = time.monotonic() + seconds, {}
    await asyncio.sleep(1)  # a heartbeat from now on
    while time.monotonic() < until:
        told = (await live()).json()
        if not (told["running"] or told["waiting"] or told["builds_pending"]):
            await asyncio.sleep(1)
            return (await live()).json()
        await asyncio.sleep(0.2)
    return told


def leaked(told: dict[str, Any]) -> int:
    """Pages that are not free, but for the page of idle slots.

    Of a server that keeps no beginnings (`--prefix-share 0`): pages that several of them share
    count as held by requests.
    """
    pool = told["pool"]
    return int(pool["total"] - 1 - pool["free"])


async def main(url: str, key: str, count: int, seed: int) -> int:
    """Run it and print the figures."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    start = time.monotonic()
    async with httpx.AsyncClient(base_url=url, timeout=120, headers=headers) as client:
        statuses, wrong = await fuzz(client, count, seed)
        told = await settled(lambda: client.get("/live"))
    print(f"{count} requests in {time.monotonic() - start:.0f} s, answers by status: {statuses}")
    print(f"running {told['running']}, waiting {told['waiting']}, leaked pages {leaked(told)}")
    print(f"wrong: {len(wrong)}", *wrong[:20], sep="\n")
    return int(bool(wrong or leaked(told) or told["running"]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("--key", default="")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    raise SystemExit(asyncio.run(main(options.url, options.key, options.count, options.seed)))
