"""A report shown again is the report that was measured, judged as if it had been just then."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.bench.test_bench_settings import report
from tests.cli.conftest import Refused

from redknot.bench import pictures
from redknot.bench.judged import CAPACITY_NOTE
from redknot.bench.kinds import read_report
from redknot.bench.records import (
    BreakdownReport,
    CapacityReport,
    DecodeReport,
    Report,
    Spread,
    TtftLength,
    TtftReport,
    TtftRow,
)
from redknot.cli import main

DROP = "question_drop:windows=context:first=0.4"
LATER = "dense:windows=decode"
SETTINGS = f"{DROP}@0.5,{DROP}@0.25,reuse"
SHORT = ["--segment-tokens", "90", "--window", "32"]
COMMANDS = {
    "ttft": ["--tokens", "400,250", *SHORT, "--settings", SETTINGS, "--repeats", "1"],
    "breakdown": ["--tokens", "400", *SHORT, "--settings", SETTINGS],
    "decode": ["--tokens", "200", "--shares", "0.5,0.25", "--batches", "1", "--steps", "3"],
    "capacity": [
        *("--tokens", "400", *SHORT, "--shares", "0.5,0.25", "--new-tokens", "4"),
        *("--pool-gib", "0.0014", "--prefill-policy", "reuse:windows=all"),
    ],
}
KINDS: dict[str, type[Report]] = {
    "ttft": TtftReport,
    "breakdown": BreakdownReport,
    "decode": DecodeReport,
    "capacity": CapacityReport,
}
WORTH = {  # the mean agreement beside each row of the first prompt; "" for a peer
    "ttft": [0.9, "", 0.91, None, 0.93],
    "breakdown": [0.9, 0.91, None, 0.93],
    "decode": [0.9, 0.92, None],
    "capacity": [0.9, 0.92, None],
}


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert main(["bench", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def files(folder: Path) -> list[str | Path]:
    folder.mkdir()
    return ["--json", folder / "r.json", "--csv", folder / "r.csv"]


def judge(path: Path) -> Path:
    """Of the half share; `reuse:windows=all` is not to be looked up for capacity."""
    return report(path, "judge", "0.5/0.5", "dense", DROP, LATER, "reuse", "reuse:windows=all")


def agreements(path: Path) -> list[Any]:
    written = json.loads(path.read_text())
    rows = written["lengths"][0]["rows"] if "lengths" in written else written["rows"]
    found = [row["fidelity"].get("judge", "") for row in rows]
    return [one and one["agreement"]["mean"] for one in found]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_report_shown_again_is_the_one_measured_and_judged_alike(
    command: str, folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fidelity is added by `show` where it was measured without, and kept where with."""
    judged, plain, again, late = (tmp_path / name for name in ("judged", "plain", "again", "late"))
    fidelity = judge(tmp_path / "judge.json")
    arguments = [command, folder, *COMMANDS[command], *files(judged), "--fidelity", fidelity]
    printed = run(capsys, *arguments)
    assert agreements(judged / "r.json") == WORTH[command]
    assert isinstance(read_report(judged / "r.json"), KINDS[command])
    assert run(capsys, "show", judged / "r.json", *files(again)) == printed
    assert run(capsys, "show", judged / "r.json", "--fidelity", fidelity) == printed
    for name in ("r.json", "r.csv"):
        assert (again / name).read_bytes() == (judged / name).read_bytes()

    written = json.loads((judged / "r.json").read_text())
    for row in written.get("rows") or [row for one in written["lengths"] for row in one["rows"]]:
        row["fidelity"] = {"other": None}
    written["notes"] = [note for note in written["notes"] if note != CAPACITY_NOTE]
    plain.write_text(json.dumps(written))
    kept = run(capsys, "show", plain)
    assert kept != printed
    assert CAPACITY_NOTE[:40] not in kept
    assert run(capsys, "show", plain, "--fidelity", fidelity, *files(late)) == printed
    assert ("of dense:windows=decode" in printed) == (command == "capacity")
    for name in ("r.json", "r.csv"):
        assert (late / name).read_bytes() == (judged / name).read_bytes()


def small(*names: str, device: str = "GPU X", **spread: float) -> dict[str, Any]:
    """A report of times to first token at two lengths, as JSON."""
    seconds = {"median": 2.0, "low": 1.0, "high": 3.0, "n": 3} | spread
    rows = [{"name": name, "kind": "setting", "seconds": seconds} for name in names]
    rest = {"segments": [9], "build_seconds": None, "stored_bytes": 0, "best_dense": "none"}
    return {
        "benchmark": "time to first token",
        "model": "m",
        "environment": {"device": device},
        "settings": {},
        "matmul_flops_per_second": 1.0,
        "calibration_seconds": None,
        "lengths": [{"tokens": tokens, "rows": rows} | rest for tokens in (3000, 8192)],
    }


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (None, "No such file"),
        ("", "truncated"),
        ('{"benchmark": "ti', "truncated"),
        ("model,tokens", "malformed"),
        ("[]", "array"),
        ("{}", "benchmark"),
        ('{"benchmark": "time to last token"}', "last token"),
        ('{"benchmark": "capacity"}', "model"),
        (b'{"benchmark": "\xff"}', "not a report"),
        ('{"x": ' + "[" * 100_000, "not a report"),
        (json.dumps(small("reuse") | {"lengths": [{}]}), "lengths"),
        (json.dumps(small("reuse") | {"benchmark": "capacity"}), "missing"),
        (json.dumps(small("reuse") | {"environment": {}}), "device"),
    ],
)
def test_a_file_that_is_no_report_is_refused_in_one_line(
    damage: str | bytes | None, reason: str, tmp_path: Path, refused: Refused
) -> None:
    path = tmp_path / "r.json"
    if damage is not None:
        path.write_bytes(damage if isinstance(damage, bytes) else damage.encode())
    line = refused("bench", "show", path, "--csv", tmp_path / "r.csv")
    assert "r.json" in line
    assert reason in line


def test_what_show_cannot_do_is_refused_before_anything_is_written(
    tmp_path: Path, refused: Refused
) -> None:
    path, written = tmp_path / "r.json", tmp_path / "again.json"
    path.write_text(json.dumps(small("magic@0.5")))
    fidelity = judge(tmp_path / "judge.json")
    show = ["bench", "show", path, "--json", written]
    assert "row 'magic@0.5'" in refused(*show, "--fidelity", fidelity)
    assert "judge" in refused(*show[:2], fidelity)
    assert "not a report of redknot eval" in refused(*show, "--fidelity", path)
    assert "picture" in refused(*show, "--picture", tmp_path / "r.txt")
    assert "--commit" in refused(*show, "--commit", "abc")
    assert main(list(map(str, show))) == 0  # without reports a name says nothing but itself
    assert json.loads(written.read_text())["lengths"][1]["rows"][0]["name"] == "magic@0.5"


def test_a_picture_says_model_gpu_and_token_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    real = pictures._save

    def watched(path: Path, draw: Any) -> None:
        real(path, lambda axes: (draw(axes), seen.append(axes)))

    monkeypatch.setattr(pictures, "_save", watched)
    path = tmp_path / "r.json"
    path.write_text(json.dumps(small("dense", "reuse")))
    assert main(["bench", "show", str(path), "--picture", str(tmp_path / "r.svg")]) == 0
    (axes,) = seen
    assert (tmp_path / "r.svg").read_text().rstrip().endswith("</svg>")
    assert axes.get_title() == "m, GPU X"
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["3000", "8192"]
    shown = [tick.get_text() for tick in axes.get_yticklabels(which="both")]
    assert all(re.fullmatch(r"[\d.]*", text) for text in shown)
    box, legend = axes.get_window_extent(), axes.get_legend().get_window_extent()
    assert legend.y1 < box.y0


def test_a_report_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text(json.dumps(small("reuse", low=1.5)))
    row = TtftRow(name="reuse", kind="setting", seconds=Spread(2.0, 1.5, 3.0, 3))
    lengths = [
        TtftLength(
            tokens=tokens,
            segments=(9,),
            build_seconds=None,
            stored_bytes=0,
            best_dense="none",
            rows=[row],
        )
        for tokens in (3000, 8192)
    ]
    found = read_report(path)
    assert isinstance(found, TtftReport)
    assert found.lengths == lengths
    assert found.benchmark == "time to first token"
