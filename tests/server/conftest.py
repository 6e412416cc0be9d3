"""The app over a scripted engine, the same behind a socket, and a real server process."""

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import uvicorn
from tests.server.running import LEAN, SMALL, Running, wait, write_model
from tests.server.scripted import TOKENIZER, ScriptedEngine
from transformers import PreTrainedTokenizerBase

from redknot.server.app import build_app
from redknot.server.rendering import Renderer
from redknot.server.service import Service
from redknot.server.settings import ServerSettings

Opened = Callable[..., httpx.AsyncClient]
Served = Callable[..., str]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


def service_over(
    engine: ScriptedEngine,
    *,
    tokenizer: PreTrainedTokenizerBase = TOKENIZER,
    **settings: object,
) -> Service:
    return Service(engine, Renderer(tokenizer), tokenizer, ServerSettings(**settings))


@pytest.fixture
def opened(engine: ScriptedEngine) -> Iterator[Opened]:
    """Opens clients of an app over ``engine``; keywords are settings, or the tokenizer."""
    services: list[Service] = []

    def open_client(key: str = "", **settings: object) -> httpx.AsyncClient:
        services.append(service_over(engine, **settings))
        transport = httpx.ASGITransport(build_app(services[-1]), raise_app_exceptions=False)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return httpx.AsyncClient(transport=transport, base_url="http://redknot", headers=headers)

    yield open_client
    for service in services:
        service.close()


@pytest.fixture
def client(opened: Opened) -> httpx.AsyncClient:
    """A client of the scripted engine, without keys."""
    return opened()


@pytest.fixture
def served(engine: ScriptedEngine) -> Iterator[Served]:
    """Serves an app over ``engine`` on a loopback port; keywords are settings."""
    stops: list[Callable[[], None]] = []

    def serve(**settings: object) -> str:
        service = service_over(engine, **settings)
        config = uvicorn.Config(build_app(service), port=0, log_config=None, lifespan="off")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        wait(lambda: server.started)

        def stop() -> None:
            server.should_exit = server.force_exit = True
            thread.join(10)
            service.close()

        stops.append(stop)
        port = server.servers[0].sockets[0].getsockname()[1]
        return f"http://127.0.0.1:{port}"

    yield serve
    for stop in stops:
        stop()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with random weights."""
    folder = tmp_path_factory.mktemp("served") / "tiny"
    write_model(folder)
    return folder


@pytest.fixture(scope="session")
def real(model_folder: Path) -> Iterator[Running]:
    """`redknot serve` with its own engine process, two keys, few pages and a short queue."""
    yield from _until_the_end(Running(str(model_folder), *SMALL))


@pytest.fixture(scope="session")
def lean(model_folder: Path) -> Iterator[Running]:
    """The same without beginnings of earlier prompts: all pages are free when nobody runs."""
    yield from _until_the_end(Running(str(model_folder), *LEAN))


def _until_the_end(running: Running) -> Iterator[Running]:
    yield running.until_ready()
    assert running.process.poll() is None, "a test ended the server"
    assert running.stop() == 0
    running.kill()


@pytest.fixture(params=["scripted", "real"])
def http(request: pytest.FixtureRequest) -> httpx.AsyncClient:
    """A client of whichever engine: for tests that hold for any answer."""
    if request.param == "scripted":
        return request.getfixturevalue("client")
    return request.getfixturevalue("real").client()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]
