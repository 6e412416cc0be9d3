"""The image's entry point and health check, without the image."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.server.conftest import Served, free_port

TEXT = Path("Containerfile").read_text()
KEY = "key-of-a-tenant"
OPEN = ["0.0.0.0", "::", "", "*", "10.0.0.5", "::ffff:0.0.0.0", "example.org", "0", "1127.0.0.1"]
LOOPBACK = ["127.0.0.1", "127.8.9.10", "localhost", "::1"]


def command(instruction: str) -> list[str]:
    """The words of an instruction in JSON form."""
    (words,) = re.findall(rf"^{instruction} (\[.*\])$", TEXT, re.MULTILINE)
    return json.loads(words)


def entered(folder: Path, host: str, key: str | None) -> "subprocess.CompletedProcess[str]":
    """Run the entry point; `redknot` is a script that says what it was told."""
    script = folder / "redknot"
    script.write_text('#!/bin/sh\necho "$@"\n')
    script.chmod(0o755)
    variables = {"PATH": f"{folder}:{os.environ['PATH']}", "REDKNOT_SERVE_HOST": host}
    if key is not None:
        variables["REDKNOT_SERVE_API_KEY"] = key
    words = [*command("ENTRYPOINT"), "/model", "--device", "cuda a"]
    return subprocess.run(words, env=variables, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("host", OPEN)
def test_beyond_loopback_a_key_is_wanted(tmp_path: Path, host: str) -> None:
    for key in (None, ""):
        refused = entered(tmp_path, host, key)
        assert refused.returncode != 0
        assert refused.stdout == ""
        assert "REDKNOT_SERVE_API_KEY" in refused.stderr
    assert entered(tmp_path, host, KEY).stdout == "serve /model --device cuda a\n"


@pytest.mark.parametrize("host", LOOPBACK)
def test_loopback_wants_none(tmp_path: Path, host: str) -> None:
    assert entered(tmp_path, host, None).stdout == "serve /model --device cuda a\n"


def test_health_is_asked_without_a_proxy(served: Served) -> None:
    """Which would be asked for this very address, and is not there."""
    port, proxy = served().rpartition(":")[2], f"http://127.0.0.1:{free_port()}"
    _, *words = command("    CMD")
    variables = {"REDKNOT_SERVE_PORT": port, "http_proxy": proxy, "HTTP_PROXY": proxy}
    found = subprocess.run(
        [sys.executable, *words], env=variables, capture_output=True, check=False
    )
    assert found.returncode == 0, found.stderr
    variables["REDKNOT_SERVE_PORT"] = str(free_port())
    found = subprocess.run(
        [sys.executable, *words], env=variables, capture_output=True, check=False
    )
    assert found.returncode != 0


def test_a_stop_leaves_time_to_drain() -> None:
    (seconds,) = re.findall(r"--stop-timeout (\d+)", TEXT)
    assert int(seconds) > 30
