"""A real server under load: clients that leave, too many at once, few pages, a stuck engine."""

import asyncio
import json
import signal
import socket
import time
from typing import Any

import httpx
import pytest
from tests.server.asked import CHAT, COMPLETIONS, ENDPOINTS, body, error_of
from tests.server.running import KEYS, MAX_REQUESTS, MAX_WAITING, Running, wait

pytestmark = pytest.mark.anyio
both = pytest.mark.parametrize("url", ENDPOINTS)
streamed = pytest.mark.parametrize("stream", [True, False])
LONG: dict[str, Any] = {"ignore_eos": True}
CANCELLED = ("redknot:requests_total", 'reason="cancelled"')


def send(running: Running, url: str, request: dict[str, Any]) -> socket.socket:
    """A request on a socket of its own, which the caller closes."""
    host, port = running.address.removeprefix("http://").split(":")
    content = json.dumps(request).encode()
    lines = [f"POST {url} HTTP/1.1", "Host: redknot", "Content-Type: application/json"]
    lines += [f"Authorization: Bearer {KEYS[0]}", f"Content-Length: {len(content)}", "", ""]
    connection = socket.create_connection((host, int(port)))
    connection.sendall("\r\n".join(lines).encode() + content)
    return connection


def work(running: Running) -> tuple[int, int]:
    live = running.live()
    return live["running"], live["waiting"]


@both
@streamed
def test_a_client_that_leaves_while_it_decodes(lean: Running, url: str, stream: bool) -> None:
    """SV-10: nobody runs and pages are free within 2 s."""
    wait(lean.is_empty, 30)
    connection = send(lean, url, body(url, n=3, stream=stream, **LONG))
    wait(lambda: work(lean)[0] == 1)
    if stream:
        connection.recv(100)
    connection.close()
    wait(lean.is_empty, 2)


@both
@streamed
@pytest.mark.parametrize("delay", [0.0, 0.01, 0.03, 0.1])
def test_a_client_that_leaves_at_any_time(
    lean: Running, url: str, stream: bool, delay: float
) -> None:
    """SV-10: before the engine knows, in prefill, or just behind it."""
    wait(lean.is_empty, 30)
    connection = send(lean, url, body(url, text="long " * 190, stream=stream, **LONG))
    time.sleep(delay)
    connection.close()
    wait(lean.is_empty, 2)


@both
@streamed
def test_a_client_that_leaves_while_it_waits(lean: Running, url: str, stream: bool) -> None:
    """SV-10: others go on, and then the queue is empty."""
    lean.until_idle()  # a client of before may have left before the server had its body
    left = lean.counter(*CANCELLED)
    request = body(COMPLETIONS, n=MAX_REQUESTS, max_tokens=990, **LONG)
    running = send(lean, COMPLETIONS, request)
    wait(lambda: work(lean) == (1, 0))
    waits = send(lean, url, body(url, stream=stream, max_tokens=990, **LONG))
    wait(lambda: work(lean) == (1, 1))
    waits.close()
    wait(lambda: lean.counter(*CANCELLED) > left, 2)
    assert work(lean)[1] == 0
    running.close()
    wait(lean.is_empty, 2)


@both
@streamed
async def test_what_is_too_much_is_refused_at_once(real: Running, url: str, stream: bool) -> None:
    """SV-17: 20 at once, of which at most those fit that run and 4 that wait."""
    client, took = real.client(), list[float]()

    async def ask() -> int:
        start = time.monotonic()
        response = await client.post(url, json=body(url, max_tokens=150, stream=stream, **LONG))
        if response.status_code != 200:
            took.append(time.monotonic() - start)
            assert error_of(response, 429)["code"] == "queue_full"
            assert int(response.headers["retry-after"]) >= 1
        return response.status_code

    for _ in range(3):  # a time that others on the machine may spoil
        took.clear()
        codes = await asyncio.gather(*(ask() for _ in range(20)))
        assert set(codes) == {200, 429}
        assert MAX_WAITING <= codes.count(200) <= MAX_WAITING + MAX_REQUESTS
        if max(took) < 0.2:
            return
    pytest.fail(f"a refusal took {max(took):.3f} s")


async def test_what_was_computed_twice_is_no_hit(real: Running) -> None:
    """SV-15: more pages are wanted than there are, so requests give way and begin again."""
    real.until_idle()  # metrics follow the heartbeats
    before = [real.counter(name) for name in NAMES]
    client = real.client()

    async def ask(at: int) -> httpx.Response:
        prompt = f"{at}{chr(97 + at) * 20}"
        return await client.post(
            COMPLETIONS, json={"prompt": prompt, "seed": at, "max_tokens": 990, **LONG}
        )

    for response in await asyncio.gather(*(ask(at) for at in range(MAX_REQUESTS))):
        assert response.json()["usage"]["completion_tokens"] == 990
        cached = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached <= 1  # BOS, which all prompts share
    real.until_idle()
    preemptions, hits, reused = (
        real.counter(name) - start for name, start in zip(NAMES, before, strict=True)
    )
    assert preemptions > 0
    assert hits <= MAX_REQUESTS
    assert reused == 0


NAMES = ("vllm:num_preemptions_total", "vllm:prefix_cache_hits_total", "redknot:hit_tokens_total")


def test_a_stuck_engine_is_told(real: Running) -> None:
    """SV-21: within 10 s, and no longer once it moves again."""
    engine = real.engine()
    with real.http(key=None) as client:
        assert client.get("/health").status_code == 200
        engine.send_signal(signal.SIGSTOP)
        try:
            start = time.monotonic()
            wait(lambda: client.get("/health").status_code == 503, 10)
            assert time.monotonic() - start > 1
            assert error_of(client.get("/health"), 503)["code"] == "engine_stuck"
        finally:
            engine.send_signal(signal.SIGCONT)
        wait(lambda: client.get("/health").status_code == 200, 5)
    with real.http() as client:
        assert client.post(CHAT, json=body(CHAT, max_tokens=1)).status_code == 200
