"""Pictures of what the benchmarks found."""

from collections.abc import Callable, Iterable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from redknot.bench.records import (
    BreakdownReport,
    CapacityReport,
    DecodeReport,
    Report,
    Spread,
    TrafficReport,
    TtftReport,
)

Point = tuple[str, float, Spread]
"A line's name, where on the x axis, and what was measured there."
MARKERS = "osD^v<>P"


def ttft_picture(report: TtftReport, path: Path) -> None:
    """Seconds to the first token over prompt length, a line a contender."""
    points = [
        (row.name, float(length.tokens), row.seconds)
        for length in report.lengths
        for row in length.rows
        if row.seconds is not None
    ]
    _lines(path, _title(report), points, ("prompt tokens", "seconds to first token"))


def decode_picture(report: DecodeReport, path: Path) -> None:
    """Seconds of a step over batch size, a line a setting."""
    points = [
        (row.name, float(row.batch), row.step_seconds)
        for row in report.rows
        if row.step_seconds is not None
    ]
    title = _title(report, f"{report.tokens} tokens of random K/V")
    _lines(path, title, points, ("requests of a batch", "seconds of a step"))


def breakdown_picture(report: BreakdownReport, path: Path) -> None:
    """A bar a setting, stacked by part in order of time."""
    longest_first = sorted(report.rows, key=lambda row: -len(row.parts))
    names = list(dict.fromkeys(part.name for row in longest_first for part in row.parts))

    def draw(axes: Any) -> None:
        labels = [row.name for row in report.rows]
        left = [0.0] * len(labels)
        for index, name in enumerate(names):
            spent = [
                sum(part.milliseconds for part in row.parts if part.name == name)
                for row in report.rows
            ]
            look = {"color": f"C{index % 10}", "hatch": ("", "//", "..")[index // 10 % 3]}
            axes.barh(labels, spent, left=left, label=name, **look)
            left = [done + more for done, more in zip(left, spent, strict=True)]
        axes.invert_yaxis()
        axes.set(xlabel="milliseconds", title=_title(report, f"{report.tokens} tokens"))
        _legend(axes, loc="center left", bbox_to_anchor=(1.01, 0.5))

    _save(path, draw)


def capacity_picture(report: CapacityReport, path: Path) -> None:
    """Residents and their tokens per second, side by side, a bar a setting."""

    def draw(axes: Any) -> None:
        labels = [row.name for row in report.rows]
        places = range(len(labels))
        axes.barh(places, [row.residents for row in report.rows], height=0.4, label="residents")
        axes.set_yticks([place + 0.2 for place in places], labels)
        axes.invert_yaxis()
        axes.set(xlabel="residents", title=_title(report, f"{report.tokens} tokens"))
        rates = [row.tokens_per_second or 0.0 for row in report.rows]
        other = axes.twiny()
        lower = [place + 0.4 for place in places]
        other.barh(lower, rates, height=0.4, color="C1", label="tokens/s")
        other.set(xlabel="tokens per second of all residents (lower bars)")

    _save(path, draw)


def traffic_picture(report: TrafficReport, path: Path) -> None:
    """Seconds to the first token over clients, a line a setting."""
    points = [
        (row.name, float(row.clients), row.ttft_seconds)
        for row in report.rows
        if row.ttft_seconds is not None
    ]
    title = _title(report, f"{report.tokens} tokens")
    _lines(path, title, points, ("clients", "seconds to first token"))


def _lines(path: Path, title: str, points: Iterable[Point], labels: tuple[str, str]) -> None:
    """On logarithmic axes, with bars from low to high; dense is dashed and hollow.

    Below the axes stands what each line is: names of settings are long.
    """
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    lines: dict[str, list[tuple[float, Spread]]] = {}
    for name, place, spread in points:
        lines.setdefault(name, []).append((place, spread))

    def draw(axes: Any) -> None:
        for (name, found), marker in zip(lines.items(), cycle(MARKERS), strict=False):
            bars = _bars([spread for _, spread in found])
            medians = [spread.median for _, spread in found]
            look = {"fmt": f"{marker}-", "capsize": 2, "label": name}
            if name == "dense" or name.startswith("dense ("):
                look |= {"fmt": f"{marker}--", "markerfacecolor": "none", "markersize": 9}
            axes.errorbar([place for place, _ in found], medians, bars, **look)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        ticks = sorted({place for found in lines.values() for place, _ in found})
        axes.set_xticks(ticks, [f"{tick:.0f}" for tick in ticks])
        axes.set_xticks([], minor=True)
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 5.0, 7.0)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set(xlabel=labels[0], ylabel=labels[1], title=title)
        axes.grid(alpha=0.3)
        _legend(axes, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)

    _save(path, draw)


def _bars(found: Sequence[Spread]) -> list[list[float]]:
    below = [spread.median - spread.low for spread in found]
    return [below, [spread.high - spread.median for spread in found]]


def _title(report: Report, *more: str) -> str:
    return ", ".join([report.model, report.environment["device"], *more])


def _legend(axes: Any, **place: Any) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, **place)


def _save(path: Path, draw: Callable[[Any], None]) -> None:
    """The file appears whole."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.2))
    draw(figure.subplots())
    part = path.with_name(path.name + ".part")
    figure.savefig(part, format=path.suffix[1:], bbox_inches="tight", dpi=150)
    part.replace(path)
