"""`redknot bench show`, and how all benchmarks print, write and draw their reports."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from redknot.bench import tables
from redknot.bench.fidelity import FidelityReports
from redknot.bench.kinds import KINDS, judge, read_report
from redknot.bench.records import Report
from redknot.cli.console import check_picture, check_writable, console, write_json
from redknot.cli.options import Flat, Paths


@dataclass(frozen=True, kw_only=True, slots=True)
class Reporting:
    """What stands beside the figures, and where they go."""

    fidelity: Paths = field(default_factory=list)
    "Reports of `redknot eval --json`: what each says of a setting stands beside its speed."
    json: Path | None = None
    "Write the report here, anew after each step."
    csv: Path | None = None
    "Write flat rows here."
    picture: Path | None = None
    "Draw the report here (PNG, SVG or PDF)."

    def open(self) -> FidelityReports:
        """The reports; `InputError` before any long work if a file cannot be read or written."""
        check_writable(self.json, self.csv)
        check_picture(self.picture)
        return FidelityReports.read(self.fidelity)

    def write(self, report: Report, reports: FidelityReports) -> None:
        """JSON and CSV, each whole or not at all."""
        report = judge(report, reports)
        write_json(self.json, report)
        if self.csv is not None:
            part = self.csv.with_name(self.csv.name + ".part")
            part.write_text(tables.as_csv(KINDS[type(report)].rows(report)), encoding="utf-8")
            part.replace(self.csv)

    def finish(self, report: Report, reports: FidelityReports) -> None:
        """The table, what must be known to read it, and the picture."""
        report, kind = judge(report, reports), KINDS[type(report)]
        title = f"{report.model}: {report.benchmark}, {report.environment['device']}"
        console.print(tables.as_table(title, kind.rows(report), kind.columns))
        for note in report.notes:
            console.print(note, markup=False)
        if self.picture is not None:
            kind.draw(report, self.picture)


def show(report: Path, *, out: Annotated[Reporting, Flat] = Reporting()) -> None:
    """Show a written report again, beside other evaluation reports if asked; measure nothing.

    Parameters
    ----------
    report
        What `redknot bench` wrote with `--json`.
    """
    reports = out.open()
    found = read_report(report)
    out.write(found, reports)
    out.finish(found, reports)
