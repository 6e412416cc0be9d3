"""The kinds of report, told by their `benchmark` field: how each is judged, shown and drawn."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from redknot.bench import judged, pictures, rows, tables
from redknot.bench.fidelity import FidelityReports
from redknot.bench.records import (
    BreakdownReport,
    CapacityReport,
    DecodeReport,
    Report,
    TrafficReport,
    TtftReport,
)
from redknot.errors import InputError

R = TypeVar("R", bound=Report)


@dataclass(frozen=True, slots=True)
class Kind(Generic[R]):
    """What can be done with a report once it is measured."""

    judge: Callable[[R, FidelityReports], R]
    "The same beside what evaluation reports say."
    rows: Callable[[R], Iterable[rows.Flat]]
    columns: tables.Columns
    draw: Callable[[R, Path], None]


KINDS: dict[type[Report], Kind[Any]] = {
    TtftReport: Kind(judged.judge_ttft, rows.ttft_rows, tables.TTFT, pictures.ttft_picture),
    BreakdownReport: Kind(
        judged.judge_by_name, rows.breakdown_rows, tables.BREAKDOWN, pictures.breakdown_picture
    ),
    DecodeReport: Kind(
        judged.judge_decode, rows.decode_rows, tables.DECODE, pictures.decode_picture
    ),
    CapacityReport: Kind(
        judged.judge_capacity, rows.capacity_rows, tables.CAPACITY, pictures.capacity_picture
    ),
    TrafficReport: Kind(
        judged.judge_by_name, rows.traffic_rows, tables.TRAFFIC, pictures.traffic_picture
    ),
}


def read_report(path: Path) -> Report:
    """A report that `redknot bench` wrote; `InputError` for any other file."""
    kinds = TtftReport | BreakdownReport | DecodeReport | CapacityReport | TrafficReport
    try:
        found: Report = msgspec.json.decode(path.read_bytes(), type=kinds)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{path}: not a report of redknot bench: {error}") from error
    if "device" not in found.environment:
        raise InputError(f"{path}: not a report of redknot bench: its environment has no device")
    return found


def judge(report: R, reports: FidelityReports) -> R:
    """The report with their fidelity in place of its own; itself if there are none."""
    if not reports.reports:
        return report
    judged_report: R = KINDS[type(report)].judge(report, reports)
    return judged_report
