"""The picture of the table: who takes how long, operation by operation."""

from collections.abc import Sequence
from pathlib import Path

from .record import Record

PANELS = (
    ("prefill", "tokens=8192 window=256 page=128"),
    ("prefill", "tokens=32768 window=256 page=128"),
    ("prefill", "tokens=131072 window=256 page=128"),
    ("prefill", "tokens=32768 window=4096 page=128"),
    ("gathered", "tokens=32768 window=256 page=128 rows=8192"),
    ("score_select", "tokens=32768 rows=64 page=64"),
    ("decode", "requests=8 tokens=32768 window=256 page=64"),
    ("decode", "requests=4 tokens=131072 window=256 page=64"),
    ("append", "streams=512 rows=4096 page=64"),
)
COLOURS = {"ours": "tab:red", "peer": "tab:blue", "floor": "silver"}
COLUMNS = 3


def draw(records: Sequence[Record], machine: dict[str, str], path: Path) -> None:
    """Bars with 20 and 80 % points on a logarithmic axis; ours in red, floors in grey."""
    from matplotlib.figure import Figure

    panels = [panel for panel in PANELS if _rows(records, *panel)]
    if not panels:  # another setting: what there is
        panels = list(dict.fromkeys((r.op, r.shape) for r in records if r.usable))[:9]
    lines = -(-len(panels) // COLUMNS)
    figure = Figure(figsize=(5.2 * COLUMNS, 3.2 * lines + 0.4), layout="constrained")
    axes = list(figure.subplots(lines, COLUMNS, squeeze=False).flat)
    for place, (op, shape) in zip(axes, panels, strict=False):
        rows = sorted(_rows(records, op, shape), key=lambda r: -r.median_us)
        spread = [
            [max(0.0, r.median_us - (r.p20_us or r.median_us)) for r in rows],
            [max(0.0, (r.p80_us or r.median_us) - r.median_us) for r in rows],
        ]
        names, medians = [r.impl for r in rows], [r.median_us for r in rows]
        colours = [COLOURS.get(r.kind, "grey") for r in rows]
        bars = place.barh(names, medians, xerr=spread, color=colours)
        place.bar_label(bars, [_time(median) for median in medians], padding=3, fontsize=7)
        place.set_xscale("log")
        place.set_xlim(min(medians) / 2, max(medians) * 4)
        place.set_title(f"{op}: {shape}", fontsize=8)
        place.tick_params(labelsize=7)
    for place in axes[len(panels) :]:
        place.set_axis_off()
    figure.suptitle(
        f"{machine.get('device', '')}, torch {machine.get('torch', '')}, triton"
        f" {machine.get('triton', '')}, commit {machine.get('commit', '')}; microseconds",
        fontsize=9,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def _rows(records: Sequence[Record], op: str, shape: str) -> list[Record]:
    return [r for r in records if (r.op, r.shape) == (op, shape) and r.usable]


def _time(microseconds: float) -> str:
    if microseconds < 1000:
        return f"{microseconds:.1f} us"
    return f"{microseconds / 1000:.2f} ms"
