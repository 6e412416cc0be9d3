"""Bad input ends in exit code 2, one line on stderr that names it, and no file."""

import json
import re
from pathlib import Path

import pytest
from tests.cli.conftest import Refused, row

from redknot.heads import HeadMap, HeadRule


def head_map(path: Path, *, layers: int = 4, weights: str | None = None) -> Path:
    rules = ((HeadRule.local(8, 4),) * 2,) * layers
    HeadMap(prefill=rules, decode=rules, weights=weights, model="other").save(path)
    return path


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def generate(folder: str, tmp_path: Path, *documents: Path) -> list[str | Path]:
    command = ["generate", folder, "--question", "When?", "--json", tmp_path / "answer.json"]
    return [*command, *(["--documents", *documents] if documents else [])]


def evaluate(folder: str, tmp_path: Path, data: Path) -> list[str | Path]:
    command = ["eval", folder, "--data", data, "--json", tmp_path / "r.json"]
    return [*command, "--policies", "reuse", "--no-timing"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "no such file"), (b" \n", "empty"), (b"caf\xe9 au lait", "UTF-8")],
    ids=["missing", "empty", "latin-1"],
)
def test_an_unreadable_document_is_named(
    content: bytes | None, reason: str, folder: str, tmp_path: Path, refused: Refused
) -> None:
    path = tmp_path / "bad.txt"
    if content is not None:
        write(path, content)
    for command in (
        generate(folder, tmp_path, path),
        ["inspect", "segment", path, "--model", folder, "--json", tmp_path / "s.json"],
    ):
        line = refused(*command)
        assert str(path) in line
        assert reason in line


def test_a_document_folder_without_files_is_named(
    folder: str, tmp_path: Path, refused: Refused
) -> None:
    (tmp_path / "none").mkdir()
    line = refused(*generate(folder, tmp_path, tmp_path / "none"))
    assert str(tmp_path / "none") in line


def test_a_prompt_beyond_the_context_is_refused_with_both_numbers(
    folder: str, tmp_path: Path, refused: Refused
) -> None:
    long = write(tmp_path / "long.txt", b"x" * 9000)
    line = refused(*generate(folder, tmp_path, long))
    numbers = [int(number) for number in re.findall(r"\d+", line)]
    assert 8192 in numbers
    assert any(9000 < number < 9500 for number in numbers)


def test_a_map_of_another_model_or_shape_is_refused(
    folder: str, tmp_path: Path, document: Path, refused: Refused
) -> None:
    command = [*generate(folder, tmp_path, document), "--head-map"]
    foreign = head_map(tmp_path / "foreign.json", weights="0" * 64)
    assert "other weights" in refused(*command, foreign)
    short = head_map(tmp_path / "short.json", layers=3)
    assert re.search(r"\b3 layers.*\b4\b", refused(*command, short))
    broken = write(tmp_path / "broken.json", b"{")
    assert str(broken) in refused(*command, broken)
    assert str(tmp_path / "none.json") in refused(*command, tmp_path / "none.json")
    assert str(broken) in refused("inspect", "map", broken, "--json", tmp_path / "m.json")
    assert str(broken) in refused("inspect", "plan", broken, "--json", tmp_path / "m.json")


MALFORMED = {
    "json": "{",
    "no question": json.dumps({**row(0), "question": " "}),
    "documents are a string": json.dumps({**row(0), "documents": "text"}),
    "documents without text": json.dumps({**row(0), "documents": [{"text": " "}]}),
    "no answers": json.dumps({**row(0), "answers": []}),
    "answers missing": json.dumps({k: v for k, v in row(0).items() if k != "answers"}),
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_a_malformed_row_is_named_by_file_and_line(
    kind: str, folder: str, data: Path, tmp_path: Path, refused: Refused
) -> None:
    data.write_text(data.read_text() + "\n" + MALFORMED[kind] + "\n")
    assert f"{data}:6" in refused(*evaluate(folder, tmp_path, data))


@pytest.mark.parametrize("content", [None, b"", b"\n\n", b"\xff\xfe"])
def test_data_without_rows_are_named(
    content: bytes | None, folder: str, tmp_path: Path, refused: Refused
) -> None:
    path = tmp_path / "data.jsonl"
    if content is not None:
        write(path, content)
    assert str(path) in refused(*evaluate(folder, tmp_path, path))


@pytest.mark.parametrize(
    ("policy", "named"),
    [
        ("magic", "magic"),
        ("epic:depth=3", "depth"),
        ("epic:k=-1", "k must"),
        ("epic:k=many", "k=many"),
        ("question_drop:first=2", "first"),
        ("duo", "duo needs a head map"),
        ("redknot", "redknot needs a head map"),
    ],
)
def test_a_policy_that_cannot_run_is_named(
    policy: str,
    named: str,
    folder: str,
    data: Path,
    document: Path,
    tmp_path: Path,
    refused: Refused,
) -> None:
    assert named in refused(*generate(folder, tmp_path, document), "--policy", policy)
    report = ["--json", tmp_path / "r.json"]
    assert named in refused("eval", folder, "--data", data, "--policies", policy, *report)


@pytest.mark.parametrize(
    "option",
    ["--max-tokens=0", "--max-tokens=many", "--temperature=-1", "--top-p=0", "--top-p=1.5"],
)
def test_a_sampling_option_out_of_range_is_refused(
    option: str, folder: str, document: Path, tmp_path: Path, refused: Refused
) -> None:
    refused(*generate(folder, tmp_path, document), option)


@pytest.mark.parametrize(
    "option",
    [
        "--prompts=0",
        "--prompts=1",
        "--window=0",
        "--sink=-1",
        "--global-share=1.5",
        "--shares=-1",
        "--method=x",
    ],
)
def test_a_profile_option_out_of_range_is_refused(
    option: str, folder: str, data: Path, tmp_path: Path, refused: Refused
) -> None:
    command = ["profile", folder, "--data", data, "--out", tmp_path / "map.json"]
    command += ["--min-tokens", "100", "--windows", "16"]
    if not option.startswith("--prompts="):
        command += ["--prompts", "2"]
    refused(*command, "--quality-prompts", "2", option)


@pytest.mark.parametrize("option", ["--answer-tokens=0", "--limit=0", "--min-tokens=100000"])
def test_an_eval_option_that_leaves_nothing_to_measure_is_refused(
    option: str, folder: str, data: Path, tmp_path: Path, refused: Refused
) -> None:
    refused(*evaluate(folder, tmp_path, data), option)


def test_timing_and_its_absence_exclude_each_other(
    folder: str, data: Path, tmp_path: Path, refused: Refused
) -> None:
    line = refused(*evaluate(folder, tmp_path, data), "--timing-only")
    assert "--no-timing" in line
    assert "--timing-only" in line


def test_unknown_flags_commands_and_models_are_refused(
    folder: str, document: Path, tmp_path: Path, refused: Refused
) -> None:
    assert "--colour" in refused(*generate(folder, tmp_path, document), "--colour", "red")
    assert "paint" in refused("paint", folder)
    assert "question" in refused("generate", folder, "--documents", document)
    missing = str(tmp_path / "no-model")
    assert missing in refused(*generate(missing, tmp_path, document))
    empty = tmp_path / "empty-model"
    empty.mkdir()
    assert str(empty) in refused(*generate(str(empty), tmp_path, document))
