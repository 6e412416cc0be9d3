"""A result that cannot be written is refused with one line, before anything is left behind."""

from pathlib import Path

import pytest
from tests.cli.conftest import Refused


def test_results_that_could_not_be_written_are_refused_first(
    folder: str, data: Path, document: Path, tmp_path: Path, refused: Refused
) -> None:
    nowhere = tmp_path / "nowhere" / "x.json"
    base = ["generate", folder, "--question", "q", "--documents", document]
    for option in ("--json", "--save-plan"):
        assert str(nowhere) in refused(*base, option, nowhere)
    measured = ["eval", folder, "--data", data, "--policies", "reuse"]
    for option in ("--json", "--rows", "--picture"):
        assert str(nowhere) in refused(*measured, option, nowhere)
    for option in ("--out", "--json", "--picture", "--tokens-picture"):
        out = [] if option == "--out" else ["--out", tmp_path / "map.json"]
        assert str(nowhere) in refused("profile", folder, "--data", data, *out, option, nowhere)


@pytest.mark.parametrize("option", ["--json", "--rows", "--picture"])
def test_a_folder_is_no_file_to_write_a_result_to(
    option: str, folder: str, data: Path, tmp_path: Path, refused: Refused
) -> None:
    (tmp_path / "folder").mkdir()
    command = ["eval", folder, "--data", data, "--policies", "reuse", "--no-timing"]
    assert str(tmp_path / "folder") in refused(*command, option, tmp_path / "folder")


def test_a_picture_of_an_unknown_kind_is_refused(
    folder: str, data: Path, tmp_path: Path, refused: Refused
) -> None:
    command = ["eval", folder, "--data", data, "--policies", "reuse", "--no-timing", "--limit", "1"]
    assert "p.xyz" in refused(*command, "--picture", tmp_path / "p.xyz")
