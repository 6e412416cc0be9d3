"""Settings and reports as users write them, and which report speaks of which setting."""

from pathlib import Path

import msgspec
import pytest
from tests.cli.conftest import Refused

from redknot.bench.fidelity import NOT_MEASURED, FidelityReports
from redknot.bench.rows import _fidelity
from redknot.bench.setting import DENSE, parse_settings
from redknot.errors import InputError
from redknot.evaluation.metrics import Interval
from redknot.evaluation.report import EvalReport, PolicyReport


def test_settings_are_read_with_their_shares_and_without_dense() -> None:
    text = "dense, question_drop:windows=context:first=0.4@0.125,reuse ,redknot:mass=0@0.5"
    found = parse_settings(text)
    labels = ["question_drop:windows=context:first=0.4@0.125", "reuse", "redknot:mass=0@0.5"]
    assert [setting.label for setting in found] == labels
    assert [setting.share for setting in found] == [0.125, None, 0.5]
    assert parse_settings(",".join(labels)) == found
    assert parse_settings("") == []


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("magic@0.1", "magic"),
        ("redknot", "needs a global share"),
        ("reuse:windows=context", "needs a global share"),
        ("reuse@0.5", "reads no head map"),
        ("duo@many", "'many'"),
        ("duo@1.5", "1.5"),
        ("duo@-0.1", "-0.1"),
        ("duo@nan", "nan"),
        ("duo@", "''"),
        ("duo@0.5,duo@0.50", "stands twice"),
    ],
)
def test_a_setting_that_means_nothing_is_refused(text: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        parse_settings(text)


@pytest.mark.parametrize(
    "arguments",
    [
        ["ttft", "--tokens", "300", "--settings", "redknot"],
        ["ttft", "--tokens", "x"],
        ["ttft", "--tokens", "0"],
        ["ttft", "--tokens", "90"],
        ["ttft", "--tokens", "9000"],
        ["ttft", "--tokens", "300", "--peers", "fa9"],
        ["ttft", "--tokens", "300", "--repeats", "0"],
        ["ttft", "--tokens", "300", "--fidelity", "/no/report.json"],
        ["ttft", "--tokens", "300", "--csv", "/no/folder/t.csv"],
        ["ttft", "--tokens", "300", "--picture", "t.txt"],
        ["breakdown", "--tokens", "300", "--settings", "reuse@0.5"],
        ["breakdown", "--tokens", "9000"],
        ["decode", "--tokens", "8190"],
        ["decode", "--tokens", "300", "--shares", "2"],
        ["decode", "--tokens", "300", "--batches", "0"],
        ["decode", "--tokens", "300", "--steps", "0"],
        ["capacity", "--tokens", "300"],
        ["capacity", "--tokens", "300", "--pool-gib", "0"],
        ["capacity", "--tokens", "8190", "--pool-gib", "0.01"],
        ["capacity", "--tokens", "300", "--new-tokens", "2", "--pool-gib", "0.01"],
        ["capacity", "--tokens", "300", "--pool-gib", "0.01", "--prefill-policy", "reuse"],
    ],
)
def test_the_command_line_refuses_in_one_line(
    arguments: list[str], folder: str, refused: Refused
) -> None:
    refused("bench", arguments[0], folder, *arguments[1:])


def report(path: Path, model: str, share: str | None, *names: str, em: bool = False) -> Path:
    policies = [
        PolicyReport(
            name=name,
            flops_share=0.3,
            kv_share=1.0,
            agreement=Interval(0.9 + place / 100, 0.8, 1.0),
            exact_match=Interval(0.5, 0.4, 0.6) if em else None,
        )
        for place, name in enumerate(names)
    ]
    written = EvalReport(
        model=model,
        n=40,
        datasets={},
        tokens=None,
        settings={} if share is None else {"global_share": share},
        environment={},
        floor=None,
        transformers_ttft_seconds=None,
        policies=policies,
    )
    path.write_bytes(msgspec.json.encode(written))
    return path


DROP = "question_drop:windows=context:first=0.4"


def test_a_speed_stands_beside_the_agreement_of_the_same_policy_and_share(tmp_path: Path) -> None:
    paths = [
        report(tmp_path / "a.json", "small", "0.122/0.9", DROP, "reuse", em=True),
        report(tmp_path / "b.json", "large", "0.5/0.5", DROP, f"{DROP}:then=0.1"),
        report(tmp_path / "c.json", "large", None, "reuse"),
    ]
    reports = FidelityReports.read(paths)
    again = f"large ({paths[2]})"
    text = f"{DROP}@0.125,{DROP}@0.5,duo@0.5,reuse,question_drop"
    eighth, half, *rest = parse_settings(text)
    found = {one.label: reports.of(one) for one in (DENSE, eighth, half, *rest)}
    means = {
        label: [None if one is None else one.agreement.mean for one in by_report.values()]
        for label, by_report in found.items()
    }
    assert list(found["reuse"]) == ["small", "large", again]
    assert means == {
        "dense": [None, None, None],
        eighth.label: [0.9, None, None],
        half.label: [None, 0.9, None],
        "duo@0.5": [None, None, None],
        "reuse": [0.91, None, 0.9],  # no window: the share does not matter
        "question_drop": [None, None, None],  # other options
    }
    flat = _fidelity(found[eighth.label])
    assert flat["agreement, small"] == 0.9
    assert flat["exact match, small"] == 0.5
    assert flat["agreement, large"] == NOT_MEASURED
    assert _fidelity(found["reuse"])[f"exact match, {again}"] == NOT_MEASURED


@pytest.mark.parametrize(
    ("windows", "share", "speaks"),
    [
        ("all", "0.5/0.5", True),
        ("all", "0.5/0.125", False),
        ("decode", "0.125/0.5", True),
        ("context", "0.125/0.5", False),
        ("context", "0.5/0.125", True),
        ("context", "0.49/0.5", False),
        ("all", "half", False),
    ],
)
def test_the_share_counts_in_the_phases_that_the_windows_cover(
    windows: str, share: str, speaks: bool, tmp_path: Path
) -> None:
    name = f"reuse:windows={windows}"
    reports = FidelityReports.read([report(tmp_path / "r.json", "m", share, name)])
    (setting,) = parse_settings(f"{name}@0.5")
    assert (reports.of(setting)["m"] is not None) is speaks


def test_a_policy_that_publishes_by_head_class_asks_for_its_share(tmp_path: Path) -> None:
    reports = FidelityReports.read(
        [report(tmp_path / "r.json", "m", "0.125/0.125", "redknot:windows=none")]
    )
    eighth, half = parse_settings("redknot:windows=none@0.125,redknot:windows=none@0.5")
    assert reports.of(eighth)["m"] is not None
    assert reports.of(half)["m"] is None


def test_a_file_that_is_no_report_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text("{}")
    with pytest.raises(InputError, match=r"x\.json.*not a report"):
        FidelityReports.read([path])
