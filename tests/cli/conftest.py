"""A tiny model folder, documents and rows for the command line."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.execution.eager import lively_hf

from redknot.cli import main
from redknot.models.byte_tokenizer import byte_tokenizer

Refused = Callable[..., str]
ANSWERS = ("red stone", "blue glass", "oak", "white sand")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A saved random model of four layers with two KV heads and a context of 8192 tokens."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    lively_hf().save_pretrained(path)
    byte_tokenizer(add_bos=True).save_pretrained(path)
    return str(path)


@pytest.fixture
def document(tmp_path: Path) -> Path:
    path = tmp_path / "bridge.txt"
    path.write_text("The bridge was built in 1904 of red stone. " * 6)
    return path


def row(index: int) -> dict[str, object]:
    """A question over two titled documents of more than 30 words."""
    answer = ANSWERS[index]
    texts = (f"House {index} was built of {answer}. ", f"Tower {index} was never finished. ")
    return {
        "id": f"row-{index}",
        "question": f"What was house {index} built of?",
        "answers": [answer],
        "documents": [{"title": f"{text.split()[0]} {index}", "text": text * 8} for text in texts],
    }


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Four rows."""
    path = tmp_path / "houses.jsonl"
    path.write_text("\n".join(json.dumps(row(index)) for index in range(len(ANSWERS))) + "\n")
    return path


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Run a command that must be refused and leave no trace; its line on stderr.

    Progress bars (of loading the weights) are no lines.
    """

    def run(*arguments: str | Path) -> str:
        before = sorted(tmp_path.rglob("*"))
        assert main([str(argument) for argument in arguments]) == 2
        assert sorted(tmp_path.rglob("*")) == before
        lines = re.split(r"[\r\n]+", capsys.readouterr().err)
        lines = [line for line in lines if line.strip() and "%|" not in line]
        assert len(lines) == 1, lines
        assert lines[0].startswith("redknot: ")
        assert "Traceback" not in lines[0]
        return lines[0]

    return run
