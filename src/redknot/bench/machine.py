"""The machine: what it is, how fast it multiplies, and waiting for it."""

import platform
import re
import subprocess
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from redknot.evaluation.summary import environment
from redknot.models import LoadedModel

GIB = 1 << 30


def describe_machine(device: torch.device, commit: str | None) -> dict[str, str]:
    """Devices and versions; ``commit`` where git cannot tell."""
    found = {**environment(device), "system": platform.platform(), "commit": commit or _commit()}
    try:
        found["triton"] = version("triton")
    except PackageNotFoundError:
        found["triton"] = "none"
    return found


def synchronise(device: torch.device) -> None:
    """Wait for all that ``device`` has been told to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def matmul_rate(device: torch.device, dtype: torch.dtype, repeats: int = 5) -> float:
    """FLOP/s of the best of a few products of square matrices, after an untimed one."""
    gpu = device.type == "cuda"
    size, dtype = (8192, dtype) if gpu else (2048, torch.float32)
    left = torch.randn(size, size, device=device).to(dtype)
    right = torch.randn(size, size, device=device).to(dtype)
    launches = 8 if gpu else 1

    def several() -> None:
        for _ in range(launches):
            left @ right
        synchronise(device)

    several()
    return 2 * size**3 * launches / min(seconds_of(several) for _ in range(repeats))


def seconds_of(call: Callable[[], object]) -> float:
    """Wall time of a call that ends when its work has ended."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def layer_factor(model: LoadedModel) -> float | None:
    """All layers over those that were loaded; None where none was left out."""
    cut = re.search(r"\[(\d+) of (\d+) layers\]", model.name)  # as `--layers` names the model
    return None if cut is None else int(cut[2]) / int(cut[1])


def _commit() -> str:
    """The commit of this package's own checkout, if it is one."""
    try:
        head, changes = _git("rev-parse", "HEAD"), _git("status", "--porcelain", ".")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + (" with changes" if changes else "")


def _git(*arguments: str) -> str:
    where = Path(__file__).parents[1]
    command = ["git", *arguments]
    done = subprocess.run(command, cwd=where, capture_output=True, text=True, check=True)
    return done.stdout.strip()
