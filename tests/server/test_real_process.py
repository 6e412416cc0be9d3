"""The two processes: how they start, end, and end each other."""

import asyncio
import os
import pickle
import signal
import subprocess
import threading
from pathlib import Path

import httpx
import psutil
import pytest
from tests.server.asked import CHAT, body, error_of, events
from tests.server.running import KEYS, UNVERIFIED, Running, wait
from tests.server.test_tenants import GUARDED

from redknot.engine.client import EngineClient, EngineGone
from redknot.engine.config import EngineConfig, GateConfig
from redknot.engine.messages import SegmentQuery

SKIP = GateConfig(skip=True, allow_unverified=True)


def test_a_running_answer_is_drained(model_folder: Path) -> None:
    """One signal: the answer comes to its end, then both processes do."""
    running = Running(str(model_folder), *UNVERIFIED).until_ready()
    engine, found = running.engine(), list[str]()

    def ask() -> None:
        request = body(CHAT, stream=True, max_tokens=300, ignore_eos=True)
        found.append(httpx.post(running.address + CHAT, json=request, timeout=60).text)

    thread = threading.Thread(target=ask)
    thread.start()
    wait(lambda: running.live()["running"] == 1)
    engine.send_signal(signal.SIGINT)  # as a terminal or a service manager sends to all
    engine.send_signal(signal.SIGTERM)
    assert running.stop(signal.SIGINT) == 0
    thread.join(5)
    assert events(found[0])[-1]["choices"][0]["finish_reason"] == "length"
    assert not engine.is_running()
    running.kill()


def test_a_killed_server_leaves_no_engine(model_folder: Path) -> None:
    running = Running(str(model_folder), *UNVERIFIED).until_ready()
    engine = running.engine()
    folder = next(Path(one).parent for one in engine.cmdline() if one.startswith("ipc://"))
    path = Path(str(folder).removeprefix("ipc:"))
    assert path.stat().st_mode & 0o077 == 0, "others may not speak to it"
    running.kill()
    wait(lambda: not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE, 5)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_server_that_is_ended_while_it_starts_leaves_no_engine(
    model_folder: Path, number: signal.Signals
) -> None:
    running = Running(str(model_folder), *UNVERIFIED)
    wait(lambda: bool(psutil.Process(running.process.pid).children()), 60)
    engine = running.engine()
    code = running.stop(number)
    assert code == (-signal.SIGKILL if number == signal.SIGKILL else 0)
    wait(lambda: not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE, 20)
    running.kill()


@pytest.fixture
def engine_config(model_folder: Path) -> EngineConfig:
    return EngineConfig(model=str(model_folder), head_map="none", policy="dense", gate=SKIP)


def test_junk_on_the_engines_socket_is_dropped(engine_config: EngineConfig, tmp_path: Path) -> None:
    """SE-06: nothing is unpickled, nothing breaks."""
    target = tmp_path / "planted"

    class Planted:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, (f"touch {target}",)

    async def run() -> None:
        client = await EngineClient.start(engine_config)
        for junk in (pickle.dumps(Planted()), b"", b"\xff" * 100):
            await client._socket.send(junk)
        answer = await client.segments(SegmentQuery(request_id="a"))
        assert answer.segments == ()
        await client.close(drain_seconds=1)

    asyncio.run(run())
    assert not target.exists()


def test_nothing_in_the_tree_loads_pickles() -> None:
    """SE-06."""
    for path in (Path(__file__).parents[2] / "src").rglob("*.py"):
        text = path.read_text()
        assert "pickle" not in text, path
        assert "torch.load" not in text, path


def test_a_start_that_is_given_up_leaves_no_process(
    engine_config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def start(*args: object, **kwargs: object) -> "subprocess.Popen[bytes]":
        started.append(popen(*args, **kwargs))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)

    async def give_up() -> None:
        task = asyncio.create_task(EngineClient.start(engine_config))
        await asyncio.sleep(0.3)
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()

    async def fail() -> None:
        with pytest.raises(EngineGone, match="no such file"):
            await EngineClient.start(EngineConfig(model="./missing", gate=SKIP))

    asyncio.run(give_up())
    asyncio.run(fail())
    assert len(started) == 2
    assert all(process.returncode is not None for process in started)


@pytest.mark.parametrize(("method", "path"), GUARDED)
def test_without_a_key_there_is_nothing(real: Running, method: str, path: str) -> None:
    """SE-07."""
    with real.http(key=None) as client:
        for shown in ("", "Bearer wrong-key", f"Basic {KEYS[0]}"):
            headers = {"Authorization": shown} if shown else {}
            error_of(client.request(method, path, headers=headers), 401)
    assert real.announced.startswith("http://127.0.0.1:")


def test_the_api_can_be_read_without_network(real: Running) -> None:
    with real.http() as client:
        page = client.get("/docs")
        assert page.headers["content-type"].startswith("text/html")
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert "src=" not in page.text
        assert "http" not in page.text.replace("/http", "")
        for name in client.get("/openapi.json").json()["paths"]:
            assert f" {name}</code>" in page.text
        for field in ("max_tokens", "documents", "cache_control", "question"):
            assert f"<code>{field}</code>" in page.text
