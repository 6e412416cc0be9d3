"""The gate's prompts: rows of a user's file, or questions over passages of the demo's documents."""

from importlib.resources import files
from pathlib import Path

import msgspec

from redknot.evaluation.data import Row, RowDocument, load_rows


class _Passage(msgspec.Struct, frozen=True, array_like=True):
    """Paragraphs ``start`` to ``stop`` of a document."""

    document: str
    start: int
    stop: int


class _Question(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    id: str
    question: str
    answers: tuple[str, ...]
    passages: tuple[_Passage, ...]


def rows_for_gate(path: str = "") -> list[Row]:
    """Rows of the file ``path``, or, where it is empty, the ones that ship.

    Those are short questions over passages of the demo's documents: with the embedded model 700 to
    2500 tokens each.
    """
    if path:
        return load_rows([Path(path)])
    content = files("redknot.evaluation").joinpath("gate_data", "questions.json").read_bytes()
    return [_row(one) for one in msgspec.json.decode(content, type=list[_Question])]


def _row(one: _Question) -> Row:
    documents = tuple(_cut(passage) for passage in one.passages)
    return Row(one.question, one.answers, documents, id=one.id, dataset="gate")


def _cut(passage: _Passage) -> RowDocument:
    place = files("redknot.demo").joinpath("documents", f"{passage.document}.txt")
    title, _, body = place.read_text("utf-8").partition("\n")
    paragraphs = body.strip().split("\n\n")[passage.start : passage.stop]
    return RowDocument("\n\n".join(paragraphs), title)
