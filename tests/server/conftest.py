"""The app over a scripted engine, the same behind a socket, and a real server process."""

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import uvicorn
from tests.server.scripted import TOKENIZER, ScriptedEngine
from transformers import PreTrainedTokenizerBase

from redknot.server.app import build_app
from redknot.server.rendering import Renderer
from redknot.server.service import Service
from redknot.server.settings import ServerSettings

REAL_ENGINE = True
BACKENDS = ("scripted", "real") if REAL_ENGINE else ("scripted",)
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 300,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "eos_token_id": 257,
}
OPTIONS = ("--load-format", "dummy", "--policy", "dense", "--head-map", "none")
UNVERIFIED = ("--allow-unverified", "--gate-skip", "--pool-bytes", str(32 << 20))

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
    """A config alone; weights are random."""
    folder = tmp_path_factory.mktemp("served") / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture(scope="session")
def real_server(model_folder: Path) -> Iterator[str]:
    """The address of `redknot serve` with its own engine process."""
    port = free_port()
    command = [sys.executable, "-m", "redknot", "serve", str(model_folder), "--port", str(port)]
    process = subprocess.Popen([*command, *OPTIONS, *UNVERIFIED])
    address = f"http://127.0.0.1:{port}"
    wait(lambda: process.poll() is not None or _answers(address), 120)
    assert process.poll() is None, "the server did not start"
    yield address
    process.terminate()
    assert process.wait(60) == 0


@pytest.fixture(params=BACKENDS)
def http(request: pytest.FixtureRequest) -> httpx.AsyncClient:
    """A client of whichever engine: for tests that hold for any answer."""
    if request.param == "scripted":
        return request.getfixturevalue("client")
    address = request.getfixturevalue("real_server")
    return httpx.AsyncClient(base_url=address, timeout=60)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


def _answers(address: str) -> bool:
    try:
        return httpx.get(f"{address}/health").status_code == 200
    except httpx.TransportError:
        return False


def wait(ready: Callable[[], bool], seconds: float = 10) -> None:
    until = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < until, "it took too long"
        time.sleep(0.01)
