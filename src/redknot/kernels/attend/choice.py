"""Which implementation `auto` takes: a table of measurements, kept as data."""

import json
from functools import lru_cache
from importlib import resources
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from redknot.kernels.attend.plan import AttendPlan
from redknot.kernels.paging import PagedKV


def measured(query: Tensor, kv: PagedKV, plan: AttendPlan) -> str:
    """The fastest installed implementation for the kind of call in ``plan``.

    Without a measurement for the device: triton on a GPU, torch elsewhere.
    """
    if query.device.type != "cuda":
        return "torch"
    rows = "consecutive" if all(part.rows.consecutive for part in plan.parts) else "gathered"
    major, minor = torch.cuda.get_device_capability(query.device)
    precision = "float32" if query.dtype == torch.float32 else "half"
    tokens = max(part.rows.last for part in plan.parts) + 1
    kind = (f"sm{major}{minor}", rows, precision)
    for row in _table():  # of one kind, the longest prompts come first
        if (row["arch"], row["rows"], row["precision"]) == kind and tokens >= row["from_tokens"]:
            return next(name for name in row["fastest_first"] if _installed(name))
    return "triton" if _installed("triton") else "torch"


@lru_cache
def _table() -> list[dict[str, Any]]:
    return json.loads(resources.files(__package__).joinpath("measured.json").read_text())


@lru_cache
def _installed(name: str) -> bool:
    if name == "flash":
        from redknot.kernels.attend import flash

        return flash.installed()
    return name != "triton" or find_spec("triton") is not None
