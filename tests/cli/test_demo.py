"""The shipped demo is well formed; no model is needed."""

from redknot.cli.demo import _documents, _questions


def test_the_demo_documents_have_titles_and_texts() -> None:
    documents = _documents()
    assert len(documents) == 6
    assert all(document.title.strip() and document.text.strip() for document in documents)
    assert len({document.title for document in documents}) == len(documents)
    assert not any("\n" in document.title for document in documents)


def test_every_order_is_a_permutation_of_the_documents() -> None:
    orders = [question.order for question in _questions()]
    assert len(orders) == 3
    assert all(sorted(order) == list(range(len(_documents()))) for order in orders)
    assert len(set(orders)) == len(orders)


def test_every_expected_answer_stands_in_one_document() -> None:
    for question in _questions():
        holding = [document for document in _documents() if question.expected in document.text]
        assert len(holding) == 1, question.expected


def test_no_question_gives_its_answer_away() -> None:
    for question in _questions():
        assert question.question.strip().endswith("?")
        assert question.expected.lower() not in question.question.lower()
