"""`redknot serve` as a process of its own, with its engine's process behind it."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import httpx
import psutil
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from redknot.models.byte_tokenizer import byte_tokenizer

KEYS = ("key-of-tenant-a", "key-of-tenant-b")
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
    "max_position_embeddings": 1024,
    "rope_theta": 10000.0,
}
END = 257
NEVER_TEXT = [187, 186, 185]  # tokens of the bytes 0xFF, 0xFE and 0xFD, which no text holds
UNVERIFIED = ("--head-map", "none", "--allow-unverified", "--gate-skip")
MAX_WAITING, MAX_REQUESTS = 4, 4
KEYED = [option for key in KEYS for option in ("--api-key", key)]
SMALL = (
    *("--policy", "question_drop", "--no-planned", "--pool-bytes", str(1 << 21)),
    *("--max-waiting", str(MAX_WAITING), "--max-requests", str(MAX_REQUESTS)),
    *UNVERIFIED,
    *KEYED,
)
LEAN = (*SMALL, "--prefix-share", "0")
"Keeps no beginnings, so that every page is free when nobody runs."


def write_model(folder: Path) -> None:
    """Random weights, a byte-level tokenizer, three end tokens here and one more there."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    config = AutoConfig.from_pretrained(folder)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for layer in model.model.layers:
            for name in ("q_proj", "k_proj"):
                getattr(layer.self_attn, name).weight.mul_(4.0)
    model.save_pretrained(folder)
    byte_tokenizer(add_bos=True).save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    written["eos_token_id"] = [END, *NEVER_TEXT[:2]]
    (folder / "config.json").write_text(json.dumps(written))
    generation = {"eos_token_id": [END, NEVER_TEXT[2]]}
    (folder / "generation_config.json").write_text(json.dumps(generation))


class Running:
    """A server that has been started; ``stop`` it."""

    def __init__(self, model: str, *options: str, log: IO[bytes] | None = None) -> None:
        command = [sys.executable, "-m", "redknot", "serve", model, "--port", "0", *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
        self.announced = ""
        self.address = ""

    def until_ready(self) -> "Running":
        """Wait for the line that it prints once it takes requests."""
        self.announced = self.process.stdout.readline().decode()
        assert self.announced.startswith("http://"), "the server did not start"
        self.address = self.announced.split()[0]
        return self

    def client(self, key: str | None = KEYS[0], seconds: float = 60) -> httpx.AsyncClient:
        """For asynchronous tests."""
        return httpx.AsyncClient(base_url=self.address, timeout=seconds, headers=_bearer(key))

    def http(self, key: str | None = KEYS[0], seconds: float = 60) -> httpx.Client:
        """For the others."""
        return httpx.Client(base_url=self.address, timeout=seconds, headers=_bearer(key))

    def engine(self) -> psutil.Process:
        """The engine's process."""
        (child,) = psutil.Process(self.process.pid).children()
        return child

    def live(self) -> dict[str, Any]:
        """What the live page is told."""
        with self.http() as client:
            return client.get("/live").json()

    def counter(self, name: str, label: str = "") -> float:
        """A metric, summed over all series whose labels hold ``label``."""
        with self.http() as client:
            lines = client.get("/metrics").text.splitlines()
        series = [line for line in lines if line.startswith(f"{name}{{") and label in line]
        return sum(float(line.split()[-1]) for line in series)

    def is_idle(self) -> bool:
        """Nobody runs or waits, and nothing is to be built."""
        live = self.live()
        if live["pool"] is None:  # no heartbeat has come
            return False
        return not live["running"] + live["waiting"] + live["builds_pending"]

    def is_empty(self) -> bool:
        """Idle, and no page is held; of a server that keeps no beginnings."""
        if not self.is_idle():
            return False
        pool = self.live()["pool"]
        return pool["free"] == pool["total"] - 1

    def until_idle(self, seconds: float = 30) -> None:
        """Wait until it is, in a heartbeat from now on."""
        time.sleep(0.6)
        wait(self.is_idle, seconds)

    def stop(self, number: signal.Signals = signal.SIGTERM, seconds: float = 60) -> int:
        """Send it a signal; its exit code."""
        self.process.send_signal(number)
        return self.process.wait(seconds)

    def kill(self) -> None:
        """End it whatever it does."""
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


def _bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def wait(ready: Callable[[], bool], seconds: float = 10) -> None:
    """Until ``ready``."""
    until = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < until, "it took too long"
        time.sleep(0.02)
