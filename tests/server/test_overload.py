"""Too much at once, clients that leave, and an engine that does not move."""

import asyncio
import socket
import time

import httpx
import pytest
from tests.server.asked import CHAT, ENDPOINTS, body, error_of
from tests.server.conftest import Opened, Served
from tests.server.running import wait
from tests.server.scripted import ScriptedEngine

pytestmark = pytest.mark.anyio
both = pytest.mark.parametrize("url", ENDPOINTS)


@both
@pytest.mark.parametrize("by_engine", [True, False])
async def test_what_is_too_much_is_refused_at_once(
    opened: Opened, engine: ScriptedEngine, url: str, by_engine: bool
) -> None:
    """SV-17: 4 fit, 20 are sent."""
    engine.pause = 0.01
    engine.capacity = 4 if by_engine else None
    client = opened() if by_engine else opened(max_concurrent=4)
    refused_after: list[float] = []

    async def send() -> int:
        start = time.monotonic()
        response = await client.post(url, json=body(url))
        if response.status_code != 200:
            refused_after.append(time.monotonic() - start)
            error_of(response, 429)
            assert int(response.headers["retry-after"]) >= 1
        return response.status_code

    codes = await asyncio.gather(*(send() for _ in range(20)))
    assert sorted(codes) == [200] * 4 + [429] * 16
    assert max(refused_after) < 0.2
    assert (await client.post(url, json=body(url))).status_code == 200


async def test_a_full_server_still_says_how_it_is(opened: Opened, engine: ScriptedEngine) -> None:
    engine.pause = 0.01
    client = opened(max_concurrent=1)
    busy = asyncio.create_task(client.post(CHAT, json=body(CHAT)))
    await asyncio.sleep(0.05)
    for path in ("/health", "/metrics", "/v1/models", "/live"):
        assert (await client.get(path)).status_code == 200
    assert (await busy).status_code == 200


@both
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_stops_its_work(
    served: Served, engine: ScriptedEngine, url: str, stream: bool
) -> None:
    """SV-10: in the middle of the answer."""
    engine.pause, engine.ends = 0.02, False
    address = served()
    leave(address, url, engine, stream=stream, started=True)
    request = engine.submitted[0]
    wait(lambda: (request.request_id, None) in engine.cancelled, 2)
    assert engine.running == set()


@both
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_before_the_first_token_stops_its_work(
    served: Served, engine: ScriptedEngine, url: str, stream: bool
) -> None:
    engine.pause = 3.0
    address = served()
    leave(address, url, engine, stream=stream, started=False)
    wait(lambda: engine.cancelled != [], 2)
    assert engine.running == set()


def leave(address: str, url: str, engine: ScriptedEngine, *, stream: bool, started: bool) -> None:
    """Send a request, wait until it runs, close the socket."""
    port = int(address.rpartition(":")[2])
    sent = httpx.Request("POST", address + url, json=body(url, stream=stream))
    lines = [f"POST {url} HTTP/1.1", "Host: redknot", "Content-Type: application/json"]
    lines += [f"Content-Length: {len(sent.content)}", "", ""]
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall("\r\n".join(lines).encode() + sent.content)
        wait(lambda: bool(engine.running), 5)
        if started and stream:
            connection.recv(100)
        elif started:
            time.sleep(0.2)


def test_a_slow_body_is_not_waited_for(served: Served) -> None:
    address = served(body_seconds=0.2)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2]))) as connection:
        connection.sendall(head + b"Content-Length: 100\r\n\r\n{")
        connection.settimeout(5)
        assert connection.recv(1000).startswith(b"HTTP/1.1 408 ")


async def test_health_follows_the_engine(client: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    """SV-21, as far as the server goes."""
    engine.is_alive = False
    assert error_of(await client.get("/health"), 503)["code"] == "engine_stuck"
    engine.is_alive = True
    assert (await client.get("/health")).json() == {"status": "ok"}
    engine.latest = type(engine.latest)(time=1.0, fallback="agreement 0.5 is below 0.85")
    found = await client.get("/health")
    assert found.status_code == 200
    assert found.json() == {"status": "degraded", "reason": "agreement 0.5 is below 0.85"}
