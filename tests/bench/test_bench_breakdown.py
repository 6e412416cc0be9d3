"""Parts of a prefill add up, in time and in FLOPs."""

import json
from pathlib import Path

import pytest

from redknot.bench.breakdown import breakdown, part_flops
from redknot.bench.context import Bench
from redknot.bench.prompts import PromptShape
from redknot.bench.setting import DENSE, parse_settings
from redknot.cli import main
from redknot.recovery.flops import RELOCATION_FLOPS

SETTINGS = "question_drop:windows=context:first=0.4:then=0.2@0.5,redknot:mass=0:share=0.2@0.5,reuse"


def test_parts_are_the_whole_time_of_their_run(bench: Bench) -> None:
    request = bench.ready(PromptShape(tokens=400, segment_tokens=90))
    bench.build(request)
    rows = list(breakdown(bench, request, parse_settings(SETTINGS)))
    assert [row.name for row in rows] == ["dense", *(s.label for s in parse_settings(SETTINGS))]
    for row in rows:
        total = sum(part.milliseconds for part in row.parts)
        assert row.sum_milliseconds == pytest.approx(total)
        assert sum(part.share for part in row.parts) == pytest.approx(1)
        assert total <= row.wall_milliseconds < total + 50
        names = {part.name for part in row.parts}
        assert {"lookup", "relocate", "recover/attend", "recover/finish", "sample"} <= names
        assert ("probe" in names) == row.name.startswith("question_drop")
        floors = sum(part.floor_milliseconds or 0 for part in row.parts)
        assert 0 < floors <= row.work.floor_seconds * 1e3 * (1 + 1e-9)
        assert row.first_run_seconds > 0


@pytest.mark.parametrize("setting", [DENSE, *parse_settings(SETTINGS)], ids=lambda one: one.label)
def test_flops_of_parts_are_those_of_the_plan(setting, bench: Bench) -> None:
    request = bench.ready(PromptShape(tokens=400, segment_tokens=90))
    bench.build(request)
    prefilled = bench.runner(setting).run(request).prefilled
    found, flops = part_flops(prefilled), prefilled.flops
    layout, shapes = prefilled.layout, prefilled.shapes
    relocated = RELOCATION_FLOPS * len(layout.stored) * sum(s.num_groups * 16 for s in shapes)
    assert flops.relocation == relocated
    assert sum(found.values()) == flops.total - relocated
    assert min(found.values()) > 0
    rows = [layer.active for layer in prefilled.plan.layers]
    cost = shapes[0].cost
    query = sum(len(one) for one in rows[:-1]) + 1
    keys = sum(len(one) for one in rows)
    ranked = sum(layer.ranked for layer in prefilled.plan.layers)
    assert found["recover/project"] == query * cost.query + (keys + ranked) * cost.key_value
    if prefilled.plan.probe_rows:
        probe = 4 * (39 + 64) * (cost.query + cost.key_value)
        assert found["probe/project"] == probe
        assert found["probe/finish"] == 3 * (39 + 64) * (cost.output + cost.ffn)


def test_the_command_writes_parts(folder: str, tmp_path: Path) -> None:
    files = {kind: tmp_path / f"b.{kind}" for kind in ("json", "csv", "svg")}
    command = ["bench", "breakdown", folder, "--tokens", "400", "--segment-tokens", "90"]
    command += ["--settings", "question_drop", "--json", str(files["json"])]
    command += ["--csv", str(files["csv"]), "--picture", str(files["svg"])]
    assert main(command) == 0
    found = json.loads(files["json"].read_text())
    assert [row["name"] for row in found["rows"]] == ["dense", "question_drop"]
    parts = sum(len(row["parts"]) for row in found["rows"])
    assert len(files["csv"].read_text().splitlines()) == 1 + parts + 2 * 2
    assert files["svg"].read_text().rstrip().endswith("</svg>")
    assert found["build_seconds"] > 0
