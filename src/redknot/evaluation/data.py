"""Rows of question-answering data, and padding with real distractors."""

import random
from collections.abc import Sequence
from pathlib import Path

import msgspec

from redknot.errors import InputError
from redknot.segments import Document


class RowDocument(msgspec.Struct, frozen=True):
    """One document of a row."""

    text: str
    title: str = ""


class Row(msgspec.Struct, frozen=True):
    """One question over documents. Unknown fields are ignored."""

    question: str
    answers: tuple[str, ...]
    documents: tuple[RowDocument, ...]
    id: str = ""
    dataset: str = ""

    def as_documents(self) -> list[Document]:
        """The documents as the tokeniser takes them."""
        return [Document(document.text, document.title) for document in self.documents]


def load_rows(files: Sequence[Path]) -> list[Row]:
    """All rows of JSON-lines ``files``; `InputError` names file and line of a malformed one.

    Documents without text are dropped; a row without any document or answer is malformed.
    """
    rows = []
    for path in files:
        try:
            lines = path.read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
            raise InputError(f"{path}: {reason}") from error
        for number, line in enumerate(lines, 1):
            if line.strip():
                rows.append(_parse(line, f"{path}:{number}", path.stem))
    if not rows:
        raise InputError(f"no rows in {', '.join(map(str, files))}")
    return rows


def _parse(line: str, place: str, dataset: str) -> Row:
    try:
        row = msgspec.json.decode(line, type=Row)
    except msgspec.DecodeError as error:
        raise InputError(f"{place}: malformed row: {error}") from error
    documents = tuple(document for document in row.documents if document.text.strip())
    answers = tuple(answer for answer in row.answers if answer.strip())
    if not documents or not answers or not row.question.strip():
        raise InputError(
            f"{place}: malformed row: it has no question, no answer or no document with text"
        )
    return msgspec.structs.replace(
        row,
        documents=documents,
        answers=answers,
        dataset=row.dataset or dataset,
        id=row.id or place,
    )


def interleave(rows: Sequence[Row]) -> list[Row]:
    """Rows in turn from each data set, in file order, so that a limit takes from all of them."""
    by_dataset: dict[str, list[Row]] = {}
    for row in rows:
        by_dataset.setdefault(row.dataset, []).append(row)
    queues = list(by_dataset.values())
    longest = max(map(len, queues))
    return [queue[turn] for turn in range(longest) for queue in queues if turn < len(queue)]


def pad(row: Row, pool: Sequence[RowDocument], words: int, seed: str) -> Row:
    """``row`` with distractors out of ``pool`` until it has ``words`` words, shuffled.

    No distractor holds an answer or bears the title of a document of the row. Deterministic.
    """
    chooser = random.Random(f"{seed} {row.id}")
    documents = list(row.documents)
    titles = {document.title for document in documents}
    total = sum(_words(document) for document in documents)
    for candidate in chooser.sample(pool, len(pool)):
        if total >= words:
            break
        text = candidate.text.lower()
        if candidate.title in titles or any(answer.lower() in text for answer in row.answers):
            continue
        documents.append(candidate)
        titles.add(candidate.title)
        total += _words(candidate)
    if len(documents) > len(row.documents):
        chooser.shuffle(documents)
    return msgspec.structs.replace(row, documents=tuple(documents))


def trim(row: Row, words: int) -> Row:
    """``row`` without its last documents, as long as it has more than ``words`` words."""
    documents = list(row.documents)
    while len(documents) > 1 and sum(_words(document) for document in documents) > words:
        documents.pop()
    return msgspec.structs.replace(row, documents=tuple(documents))


def distractors(rows: Sequence[Row], words: tuple[int, int] = (30, 700)) -> list[RowDocument]:
    """Titled documents of middling length from all ``rows``, each once."""
    seen: dict[str, RowDocument] = {}
    for row in rows:
        for document in row.documents:
            if document.title and words[0] <= _words(document) <= words[1]:
                seen.setdefault(document.text, document)
    return list(seen.values())


def _words(document: RowDocument) -> int:
    return len(document.text.split())
