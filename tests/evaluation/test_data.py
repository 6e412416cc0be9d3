"""Rows load or name what is wrong; padding never gives the answer away."""

import json
from pathlib import Path

import pytest

from redknot.errors import InputError
from redknot.evaluation.data import (
    Row,
    RowDocument,
    distractors,
    interleave,
    load_rows,
    pad,
    trim,
)

GOOD = {
    "question": "What?",
    "answers": ["red stone"],
    "documents": [{"title": "A", "text": "of red stone"}],
}


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def row(name: str, *, dataset: str = "", documents: tuple[RowDocument, ...] = ()) -> Row:
    return Row(
        question="q", answers=("Red Stone", "oak"), documents=documents, id=name, dataset=dataset
    )


def words(one: Row) -> int:
    return sum(len(document.text.split()) for document in one.documents)


def test_unknown_fields_are_ignored_and_missing_names_filled_in(tmp_path: Path) -> None:
    path = write(tmp_path / "set.jsonl", "", json.dumps(GOOD | {"source": {"page": 3}}))
    (found,) = load_rows([path])
    assert (found.question, found.answers) == ("What?", ("red stone",))
    assert found.documents == (RowDocument("of red stone", "A"),)
    assert (found.dataset, found.id) == ("set", f"{path}:2")
    assert found.as_documents()[0].title == "A"


def test_documents_without_text_are_dropped(tmp_path: Path) -> None:
    documents = [{"text": " "}, *GOOD["documents"], {"title": "B", "text": ""}]
    (found,) = load_rows([write(tmp_path / "x.jsonl", json.dumps(GOOD | {"documents": documents}))])
    assert [document.title for document in found.documents] == ["A"]


def test_line_separators_within_a_text_do_not_cut_a_row(tmp_path: Path) -> None:
    """JSON allows them unescaped; only a line feed ends a JSON line."""
    text = "one\u2028two\u2029three\x85four"
    line = json.dumps(GOOD | {"documents": [{"text": text}]}, ensure_ascii=False)
    (found,) = load_rows([write(tmp_path / "x.jsonl", line)])
    assert found.documents[0].text == text


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        json.dumps({"question": "q", "answers": ["a"]}),
        json.dumps(GOOD | {"question": ""}),
        json.dumps(GOOD | {"question": 3}),
        json.dumps(GOOD | {"answers": "red stone"}),
        json.dumps(GOOD | {"answers": []}),
        json.dumps(GOOD | {"answers": [" "]}),
        json.dumps(GOOD | {"documents": []}),
        json.dumps(GOOD | {"documents": [{"title": "A", "text": " "}]}),
    ],
)
def test_a_malformed_row_is_named_by_file_and_line(line: str, tmp_path: Path) -> None:
    first = write(tmp_path / "first.jsonl", json.dumps(GOOD))
    second = write(tmp_path / "second.jsonl", json.dumps(GOOD), "", line, json.dumps(GOOD))
    with pytest.raises(InputError, match=r"second\.jsonl:3: "):
        load_rows([first, second])


def test_data_sets_take_turns_in_their_own_order() -> None:
    names = [("a1", "a"), ("a2", "a"), ("a3", "a"), ("b1", "b"), ("c1", "c"), ("c2", "c")]
    rows = [row(name, dataset=dataset) for name, dataset in names]
    assert [one.id for one in interleave(rows)] == ["a1", "b1", "c1", "a2", "c2", "a3"]


OWN = (RowDocument("house of red stone " * 5, "house"),)
POOL = [
    *(RowDocument(f"filler number {index} " * 10, f"filler {index}") for index in range(20)),
    RowDocument("another RED STONE building " * 10, "spoiler"),
    RowDocument("made of oak " * 10, "second spoiler"),
    RowDocument("an old house " * 10, "house"),
    RowDocument("filler number 3 again " * 10, "filler 3"),
]


@pytest.mark.parametrize("seed", ["x", "y"])
@pytest.mark.parametrize("name", ["r1", "r2", "r3"])
def test_padding_adds_no_answer_and_no_title_twice(name: str, seed: str) -> None:
    padded = pad(row(name, documents=OWN), POOL, 10_000, seed)
    titles = [document.title for document in padded.documents]
    assert len(set(titles)) == len(titles) == 1 + 20
    assert not {"spoiler", "second spoiler"} & set(titles)
    assert padded.documents[titles.index("house")] == OWN[0]


def test_padding_stops_at_the_wanted_length() -> None:
    for wanted in (30, 100, 300):
        total = words(pad(row("r", documents=OWN), POOL, wanted, "x"))
        assert wanted <= total < wanted + 40  # the longest filler has 40 words
    enough = row("r", documents=OWN)
    assert pad(enough, POOL, words(enough), "x") == enough


def test_padding_depends_on_seed_and_row_and_nothing_else() -> None:
    first, other = row("r", documents=OWN), row("s", documents=OWN)
    assert pad(first, POOL, 200, "x") == pad(first, POOL, 200, "x")
    assert pad(first, POOL, 200, "x") != pad(first, POOL, 200, "y")
    assert pad(first, POOL, 200, "x").documents != pad(other, POOL, 200, "x").documents


def test_trimming_drops_last_documents_but_never_all() -> None:
    documents = tuple(RowDocument("word " * 10, str(index)) for index in range(4))
    whole = row("r", documents=documents)
    assert trim(whole, 25).documents == documents[:2]
    assert trim(whole, 40) == whole
    assert trim(whole, 0).documents == documents[:1]


def test_distractors_are_titled_of_middling_length_and_once() -> None:
    good = RowDocument("word " * 40, "good")
    short, long = RowDocument("word " * 29, "short"), RowDocument("word " * 701, "long")
    rows = [row("r", documents=(good, short, RowDocument("word " * 41))), row("s")]
    rows.append(row("t", documents=(long, good)))
    assert distractors(rows) == [good]
