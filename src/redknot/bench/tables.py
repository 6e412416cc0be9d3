"""Flat rows as text: CSV for spreadsheets, tables for people."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import JustifyMethod
from rich.table import Table

from redknot.bench.rows import Flat

Columns = Mapping[str, tuple[str, int]]
"From heading to the name of a value and its digits behind the point."

TTFT: Columns = {
    "tokens": ("tokens", 0),
    "contender": ("name", 0),
    "seconds": ("seconds", 3),
    "min": ("seconds_min", 3),
    "max": ("seconds_max", 3),
    "all layers*": ("extrapolated_seconds", 3),
    "first run": ("warm_up_seconds", 2),
    "speed-up": ("speed_up", 2),
    "FLOPs": ("flops_share", 3),
    "achieved": ("achieved", 2),
    "floor s": ("floor_seconds", 3),
    "cached": ("cached_tokens", 0),
    "ran": ("ran", 0),
}
BREAKDOWN: Columns = {
    "setting": ("name", 0),
    "part": ("part", 0),
    "ms": ("milliseconds", 2),
    "share": ("share", 3),
    "floor ms": ("floor_milliseconds", 2),
}
DECODE: Columns = {
    "batch": ("batch", 0),
    "setting": ("name", 0),
    "step s": ("step_seconds", 5),
    "20 %": ("step_seconds_p20", 5),
    "80 %": ("step_seconds_p80", 5),
    "all layers*": ("extrapolated_step_seconds", 5),
    "tokens/s": ("tokens_per_second", 1),
    "speed-up": ("speed_up", 2),
    "K/V kept": ("kv_share", 3),
    "first steps s": ("first_steps_seconds", 2),
}
CAPACITY: Columns = {
    "setting": ("name", 0),
    "residents": ("residents", 0),
    "to dense": ("residents_ratio", 2),
    "tokens/s": ("tokens_per_second", 1),
    "to dense ": ("tokens_per_second_ratio", 2),
    "step s": ("step_seconds", 5),
    "all layers*": ("extrapolated_step_seconds", 5),
    "first steps s": ("first_steps_seconds", 2),
    "prefill s": ("prefill_seconds", 3),
    "pages each": ("pages_each", 0),
    "in use": ("pages_in_use", 0),
    "left": ("pages_left", 0),
    "peak bytes": ("peak_bytes", 0),
}
TRAFFIC: Columns = {
    "clients": ("clients", 0),
    "setting": ("name", 0),
    "requests/s": ("requests_per_second", 2),
    "tokens/s": ("tokens_per_second", 1),
    "to dense": ("tokens_per_second_ratio", 2),
    "TTFT s": ("ttft_seconds", 3),
    "95 %": ("ttft_seconds_p95", 3),
    "sooner": ("ttft_ratio", 2),
    "token s": ("token_seconds", 4),
    "95 % ": ("token_seconds_p95", 4),
    "cached": ("cached_share", 3),
    "preempted": ("preemptions", 0),
}
WORDS = ("name", "part", "ran")
EXTRAPOLATED = "* extrapolated: times all layers over those that were loaded, nothing else changed"


def as_csv(rows: Iterable[Flat]) -> str:
    """One header of every name that any row has."""
    rows = list(rows)
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def as_table(title: str, rows: Iterable[Flat], columns: Columns) -> Table:
    """The columns of which some row has a value, and what evaluation reports say.

    Rows whose first columns are equal make a section.
    """
    rows = list(rows)
    used = _used(rows, {**columns, **_reported(rows)})
    caption = EXTRAPOLATED if any(heading.endswith("*") for heading, *_ in used) else None
    table = Table(title=title, caption=caption)
    for heading, name, _ in used:
        justify: JustifyMethod = "left" if name in WORDS else "right"
        table.add_column(heading, justify=justify, overflow="fold")
    keys = [row[used[0][1]] for row in rows]
    for place, row in enumerate(rows):
        table.add_row(*_cells(row, used))
        if len(set(keys)) < len(keys) and keys[place] != (keys[place + 1 :] or [None])[0]:
            table.add_section()
    return table


def _reported(rows: Sequence[Flat]) -> Columns:
    """Columns of evaluation reports; exact match only where some report has it."""
    names = dict.fromkeys(name for row in rows for name in row)
    known = {name for row in rows for name, value in row.items() if isinstance(value, float)}
    return {
        name: (name, 3)
        for name in names
        if name.startswith("agreement, ") or (name.startswith("exact match, ") and name in known)
    }


def _used(rows: Sequence[Flat], columns: Columns) -> list[tuple[str, str, int]]:
    return [
        (heading, name, digits)
        for heading, (name, digits) in columns.items()
        if any(row.get(name) not in (None, "") for row in rows)
    ]


def _cells(row: Flat, used: Sequence[tuple[str, str, int]]) -> list[str]:
    """In order; the name of what was skipped says why."""
    cells = [_show(row.get(name), digits) for _, name, digits in used]
    if row.get("skipped"):
        place = [name for _, name, _ in used].index("name")
        cells[place] += f" skipped: {row['skipped']}"
    return cells


def _show(value: Any, digits: int) -> str:
    if isinstance(value, float):
        return f"{value:.{digits}f}"
    return "" if value is None else str(value)
