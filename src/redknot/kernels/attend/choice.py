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

    Measured in float16 and bfloat16. Without a measurement for the device triton runs these, and
    torch everything else.
    """
    if query.device.type != "cuda" or query.dtype not in (torch.float16, torch.bfloat16):
        return "torch"
    rows = "consecutive" if all(part.rows.consecutive for part in plan.parts) else "gathered"
    major, minor = torch.cuda.get_device_capability(query.device)
    tokens = max(part.rows.last for part in plan.parts) + 1
    for row in _table():  # the first that fits
        fits = (row["arch"], row["rows"]) == (f"sm{major}{minor}", rows)
        if fits and row["from_tokens"] <= tokens and plan.num_rows <= row.get("up_to_rows", 2**62):
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
