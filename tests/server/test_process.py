"""The server's process from its start to its end."""

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest
from tests.server.asked import CHAT, body, events, pieces
from tests.server.conftest import free_port
from tests.server.scripted import ScriptedEngine

from redknot.cli import main
from redknot.cli.options import MapOption
from redknot.cli.serve import EngineOptions, GateOptions, ShadowOptions, engine_config
from redknot.engine.client import EngineClient, EngineGone
from redknot.engine.config import EngineConfig
from redknot.models.loading import LoadOptions

Started = Callable[..., tuple["subprocess.Popen[str]", str]]


@pytest.fixture
def started() -> Iterator[Started]:
    """Starts a server process over a scripted engine; its process and its address."""
    made: list[subprocess.Popen[str]] = []

    def start(engine: dict[str, Any], **settings: Any) -> tuple["subprocess.Popen[str]", str]:
        arguments = [json.dumps(engine), json.dumps({"port": 0, **settings})]
        command = [sys.executable, "-m", "tests.server.process", *arguments]
        pipe = subprocess.PIPE
        made.append(subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True))
        return made[-1], made[-1].stdout.readline().strip()

    yield start
    for process in made:
        process.kill()
        process.communicate()


def stream(address: str) -> str:
    return httpx.post(address + CHAT, json=body(CHAT, stream=True), timeout=20).text


def stream_in_vain(address: str) -> None:
    with pytest.raises(httpx.HTTPError):
        stream(address)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_running_answer_is_drained(started: Started, number: signal.Signals) -> None:
    process, address = started({"pause": 0.01})
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(stream(address)))
    thread.start()
    time.sleep(0.3)
    process.send_signal(number)
    thread.join(10)
    assert "".join(pieces(events(found[0]))) == ScriptedEngine().text
    assert process.wait(10) == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{address}/health")


def test_draining_has_an_end(started: Started) -> None:
    process, address = started({"pause": 0.05, "ends": False}, drain_seconds=1)
    asked = threading.Thread(target=stream_in_vain, args=(address,))
    asked.start()
    time.sleep(0.3)
    process.terminate()
    assert process.wait(20) == 0  # without an end it would take the limit, some 100 seconds
    asked.join(5)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_at_once(started: Started, number: signal.Signals) -> None:
    process, address = started({"pause": 0.05, "ends": False}, drain_seconds=60)

    def ask() -> None:
        with suppress(httpx.HTTPError):
            stream(address)

    asked = threading.Thread(target=ask)
    asked.start()
    time.sleep(0.5)
    process.send_signal(number)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1)
    process.send_signal(number)
    assert process.wait(20) == 0
    asked.join(5)


def test_without_its_engine_the_server_ends(started: Started) -> None:
    process, address = started({"life": 0.5, "pause": 0.02, "ends": False})
    response = httpx.post(address + CHAT, json=body(CHAT), timeout=10)
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "engine_gone"
    assert process.wait(10) == 1
    last = process.stderr.read().splitlines()[-1]
    assert json.loads(last)["message"] == "the engine has ended by itself"


def test_a_taken_port_is_one_line(model_folder: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code = main(["serve", str(model_folder), "--load-format", "dummy", "--port", port])
    assert code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"redknot: cannot listen on 127.0.0.1:{port}")


@pytest.mark.parametrize("host", ["a..b", ".a", "a" * 70, "no.such.host.invalid"])
def test_a_host_that_is_none_is_one_line(
    model_folder: Any, capsys: pytest.CaptureFixture[str], host: str
) -> None:
    code = main(["serve", str(model_folder), "--load-format", "dummy", "--host", host])
    assert code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"redknot: cannot listen on {host}:8000: ")


KEYS_OF = {
    "one key of some words": ("one key of some words",),
    "first-key-1,other-key-2": ("first-key-1", "other-key-2"),
    " first key 1 ,\nother key 2\r\n": ("first key 1", "other key 2"),
    "[not-a-list]": ("[not-a-list]",),
}


@pytest.fixture
def keys(model_folder: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Starts a server with this variable and these options; the keys that it got, if it ran."""

    def start(variable: str, *options: str) -> list[Any]:
        found: list[Any] = []

        async def run(config: Any, settings: Any, *_: Any) -> bool:
            found.append(settings.api_key)
            return True

        monkeypatch.setattr("redknot.cli.serve.run", run)
        monkeypatch.setattr("redknot.cli.serve.set_up", lambda _: None)
        monkeypatch.setenv("REDKNOT_SERVE_API_KEY", variable)
        main(["serve", str(model_folder), "--load-format", "dummy", *options])
        return found

    return start


@pytest.mark.parametrize("variable", KEYS_OF)
def test_blanks_are_part_of_a_key(keys: Callable[..., list[Any]], variable: str) -> None:
    """Of a phrase of several words no single word is a key."""
    assert keys(variable) == [KEYS_OF[variable]]
    assert keys("", "--api-key", "a key of the line") == [("a key of the line",)]


@pytest.mark.parametrize("variable", ["", " ", "\n", ",", " , \n"])
def test_a_blank_variable_does_not_open_the_server(
    keys: Callable[..., list[Any]], capsys: pytest.CaptureFixture[str], variable: str
) -> None:
    assert keys(variable) == []
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "redknot: --api-key (REDKNOT_SERVE_API_KEY) is set but holds no key"


BAD: list[tuple[list[str], str]] = [
    (["--policy", "magic"], "unknown policy"),
    (["--head-map", "missing.json"], "missing.json"),
    (["--api-key", "short"], "api-key"),
    (["--port", "70000"], "port"),
    (["--gate-skip"], "allow-unverified"),
    (["--shadow-share", "2"], "shadow-share"),
    (["--pool-bytes", "-1"], "pool-bytes"),
    (["--max-requests", "0"], "max-requests"),
    (["--max-body-bytes", "0"], "max-body-bytes"),
    (["--typo", "1"], "typo"),
]


@pytest.mark.parametrize(("options", "told"), BAD)
def test_bad_options_are_one_line(
    model_folder: Any, capsys: pytest.CaptureFixture[str], options: list[str], told: str
) -> None:
    assert main(["serve", str(model_folder), "--load-format", "dummy", *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("redknot: ")
    assert told in line


def test_a_missing_model_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "./missing"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "no such file" in line


def test_an_engine_that_cannot_start_is_one_line_and_1(
    model_folder: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(config: EngineConfig) -> None:
        raise EngineGone("the gate failed:\nagreement 0.5")

    monkeypatch.setattr(EngineClient, "start", fail)
    port = str(free_port())
    assert main(["serve", str(model_folder), "--load-format", "dummy", "--port", port]) == 1
    assert capsys.readouterr().err.splitlines() == ["redknot: the gate failed: agreement 0.5"]


def test_defaults_are_the_engines() -> None:
    plain = (LoadOptions(), MapOption(), EngineOptions(), GateOptions(), ShadowOptions())
    assert engine_config("embedded", *plain) == EngineConfig()


def test_every_option_reaches_the_engine() -> None:
    """No field of the config is left without an option."""
    config = engine_config(
        "m",
        LoadOptions(load_format="dummy", dtype="float16", device="cuda", delta="d", layers=2),
        MapOption(head_map="none"),
        EngineOptions(
            policy="dense",
            planned=False,
            pool_bytes=1,
            store_bytes=2,
            max_requests=3,
            max_waiting=4,
            step_ms=5,
            build_idle=False,
            max_builds=6,
            prefix_share=0.25,
        ),
        GateOptions(
            gate_agreement=0.1, gate_prompts=9, gate_data="x", gate_skip=True, allow_unverified=True
        ),
        ShadowOptions(shadow_share=0.5, shadow_threshold=0.6, shadow_window=7, shadow_least=2),
    )
    default = EngineConfig()
    for ours, theirs in ((config, default), (config.gate, default.gate)):
        same = [
            name for name in ours.__struct_fields__ if getattr(ours, name) == getattr(theirs, name)
        ]
        assert same == []
    shadow = config.shadow
    assert (shadow.share, shadow.threshold, shadow.window, shadow.least) == (0.5, 0.6, 7, 2)
