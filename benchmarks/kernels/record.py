"""One measurement, and the table of all of them as CSV."""

import csv
import hashlib
import importlib.metadata
import platform
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import torch

Kind = Literal["ours", "peer", "ceiling", "floor", "count", "extrapolated"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Times in microseconds; None where nothing was measured, and ``notes`` says why."""

    op: str
    shape: str
    impl: str
    kind: Kind = "peer"
    median_us: float | None = None
    p20_us: float | None = None
    p80_us: float | None = None
    samples: int = 0
    timing: str = ""
    ratio: float | None = None
    "Median over that of ``ratio_to``."
    ratio_to: str = ""
    tb_per_s: float | None = None
    "Bytes that must be read and written, over the median."
    tflop_per_s: float | None = None
    error: float | None = None
    "Norm of the difference to the reference over the norm of the reference."
    worst_error: float | None = None
    "The same for the worst row of the worst head."
    check: Literal["", "ok", "FAILED"] = ""
    notes: str = ""

    @property
    def usable(self) -> bool:
        """Measured, and not found wrong."""
        return self.median_us is not None and self.check != "FAILED"


def write(records: Iterable[Record], machine: Mapping[str, str], path: Path) -> None:
    """One line for each record, what it ran on behind it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        names = [field.name for field in fields(Record)]
        table = csv.DictWriter(file, [*names, *machine], lineterminator="\n")
        table.writeheader()
        for record in records:
            shown = {name: _shown(value) for name, value in asdict(record).items()}
            table.writerow({**shown, **machine})


def read(path: Path) -> tuple[list[Record], dict[str, str]]:
    """What `write` wrote."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    names = {field.name: str(field.type) for field in fields(Record)}
    records = [Record(**{n: _parsed(row[n], kind) for n, kind in names.items()}) for row in rows]
    return records, {key: value for key, value in rows[0].items() if key not in names}


def machine(
    device: torch.device, config: str, commit: str | None, fa3: Path | None, fa3_from: str
) -> dict[str, str]:
    """The same on every line: hardware, versions, commit, date, configuration."""
    found = {"date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")}
    found["commit"] = commit or _output("git", "rev-parse", "--short", "HEAD") or "unknown"
    if commit is None and _output("git", "status", "--porcelain"):
        found["commit"] += " with changes"
    if device.type == "cuda":
        found["device"] = torch.cuda.get_device_name(device)
        found["driver"] = _smi("driver_version")
        found["cudnn"] = str(torch.backends.cudnn.version())
    else:
        found["device"] = f"{_processor()}, {torch.get_num_threads()} threads"
    found |= {"python": platform.python_version(), "torch": torch.__version__}
    found |= {"triton": _version("triton"), "fa4": _version("flash-attn-4")}
    digest = hashlib.sha256(fa3.read_bytes()).hexdigest()[:12] if fa3 and fa3.exists() else ""
    found["fa3"] = f"{fa3_from}, sha256 {digest}" if digest else "not installed"
    return {**found, "config": config}


def max_sm_clock_hz() -> float | None:
    """The highest clock of the GPU's multiprocessors."""
    megahertz = _smi("clocks.max.sm").split(" ")[0]
    return float(megahertz) * 1e6 if megahertz.isdecimal() else None


def _smi(what: str) -> str:
    lines = _output("nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader").splitlines()
    return lines[0] if lines else "unknown"


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _shown(value: object) -> object:
    if isinstance(value, float):
        return f"{value:.5g}"
    return "" if value is None else value


def _parsed(text: str, kind: str) -> object:
    if "float" in kind:
        return float(text) if text else None
    return int(text) if "'int'" in kind else text
