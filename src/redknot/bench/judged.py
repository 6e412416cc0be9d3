"""What evaluation reports say of each row of a benchmark, told by the row's name."""

from typing import TypeVar

import msgspec

from redknot.bench.fidelity import Fidelity, FidelityReports
from redknot.bench.records import (
    BreakdownReport,
    CapacityReport,
    DecodeReport,
    TrafficReport,
    TtftLength,
    TtftReport,
    TtftRow,
)
from redknot.bench.setting import DENSE, Setting, later_rows, parse_setting
from redknot.errors import InputError

Named = TypeVar("Named", BreakdownReport, TrafficReport)

CAPACITY_NOTE = (
    "fidelity is that of dense:windows=decode under the same share, and of dense for dense K/V:"
    " what counts is which rows decoding no longer sees, not the policy that makes prefills short"
)


def judge_ttft(report: TtftReport, reports: FidelityReports) -> TtftReport:
    """The same with the fidelity of all rows but peers'."""
    lengths = [judge_length(length, reports) for length in report.lengths]
    return msgspec.structs.replace(report, lengths=lengths)


def judge_length(length: TtftLength, reports: FidelityReports) -> TtftLength:
    """As `judge_ttft`, of one length."""
    rows = [
        msgspec.structs.replace(row, fidelity=_of_ttft_row(row, reports)) for row in length.rows
    ]
    return msgspec.structs.replace(length, rows=rows)


def judge_by_name(report: Named, reports: FidelityReports) -> Named:
    """The same with the fidelity of every row, whose name says its setting."""
    rows = [
        msgspec.structs.replace(row, fidelity=reports.of(_named(row.name))) for row in report.rows
    ]
    return msgspec.structs.replace(report, rows=rows)


def judge_decode(report: DecodeReport, reports: FidelityReports) -> DecodeReport:
    """The same with the fidelity of every row."""
    rows = [
        msgspec.structs.replace(row, fidelity=reports.of(later_rows(row.share)))
        for row in report.rows
    ]
    return msgspec.structs.replace(report, rows=rows)


def judge_capacity(report: CapacityReport, reports: FidelityReports) -> CapacityReport:
    """The same with the fidelity of what decodes, and a note that it is not the prefill's."""
    rows = [
        msgspec.structs.replace(row, fidelity=reports.of(later_rows(row.share)))
        for row in report.rows
    ]
    notes = list(dict.fromkeys([*report.notes, CAPACITY_NOTE]))
    return msgspec.structs.replace(report, rows=rows, notes=notes)


def _of_ttft_row(row: TtftRow, reports: FidelityReports) -> dict[str, Fidelity | None]:
    """A setting that the planner turned down is dense."""
    if row.kind == "peer":
        return {}
    ran_dense = row.work is not None and row.work.policy == DENSE.label
    return reports.of(DENSE if ran_dense else _named(row.name))


def _named(name: str) -> Setting:
    try:
        return parse_setting(name)
    except InputError as error:
        raise InputError(f"row {name!r}: {error}") from error
