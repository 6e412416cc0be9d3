"""Every policy is measured on the same known state, whatever ran before it."""

import pytest
from tests.execution.eager import lively_session

from redknot.errors import InputError
from redknot.evaluation import EvalSettings, Row, evaluate
from redknot.evaluation.data import RowDocument
from redknot.evaluation.record import Record
from redknot.evaluation.run import prepare
from redknot.execution.session import Session
from redknot.recovery.policies import parse_policies

TEXT = "a house of red stone stood by the river "
ROWS = [
    Row(
        "What of?",
        ("stone",),
        (RowDocument(TEXT * 4, "A"), RowDocument(f"{n} {TEXT}" * 4)),
        id=f"row-{n}",
    )
    for n in range(2)
]
NAMES = ["dense", "reuse", "epic", "question_drop"]


def shares(session: Session, policies: list[str], **settings: bool) -> dict[tuple[str, str], float]:
    """FLOPs share by row and policy."""
    chosen = parse_policies(",".join(policies))
    options = EvalSettings(answer_tokens=2, timing=False, **settings)
    found = evaluate(session, ROWS, chosen, None, options)
    return {(one.id, one.policy): one.flops_share for records in found for one in records}


@pytest.mark.parametrize("planned", [True, False], ids=["planned", "as asked"])
@pytest.mark.parametrize("names", [NAMES, ["dense", "prefix", *NAMES[1:]]], ids=["", "prefix"])
def test_a_cold_measurement_reuses_nothing(names: list[str], planned: bool) -> None:
    """Neither segments nor what earlier policies on the same prompt have left."""
    session = lively_session()
    found = shares(session, names, stored=False, planned=planned)
    assert len(found) == len(ROWS) * (len(names) + 1)
    assert {key: share - found[key[0], "dense"] for key, share in found.items()} == dict.fromkeys(
        found, 0
    )
    assert not session.store.keys()


def test_the_order_of_the_policies_does_not_matter() -> None:
    names = ["dense", "prefix", *NAMES[1:]]
    ordered = shares(lively_session(), names)
    assert shares(lively_session(), [names[0], *names[:0:-1]]) == ordered
    assert ordered["row-0", "reuse"] > 0.01  # something is left to compute: the question


def test_stored_segments_are_reused_by_the_policies_that_take_them() -> None:
    found = shares(lively_session(), NAMES)
    for name in NAMES[1:]:
        assert all(found[row.id, name] < 0.9 * found[row.id, "dense"] for row in ROWS)


def test_the_floor_is_dense_through_another_path() -> None:
    options = EvalSettings(answer_tokens=2, timing=False)
    found = evaluate(lively_session(), ROWS, parse_policies("dense"), None, options)
    records = [one for records in found for one in records]
    by_name: dict[str, list[Record]] = {}
    for record in records:
        by_name.setdefault(record.policy, []).append(record)
    assert {name: len(some) for name, some in by_name.items()} == {"floor": 2, "dense": 2}
    assert all(one.agreement == 1 for one in by_name["floor"])


def test_prompts_obey_length_limit_and_answer_length() -> None:
    session = lively_session()
    (whole, other) = prepare(session, ROWS, EvalSettings())
    longer = max(len(whole[1]), len(other[1]))
    assert not list(prepare(session, ROWS, EvalSettings(min_tokens=longer + 1)))
    assert not list(prepare(session, ROWS, EvalSettings(max_answer_chars=4)))
    assert len(list(prepare(session, ROWS, EvalSettings(limit=1)))) == 1
    with pytest.raises(InputError, match="no row"):
        evaluate(session, ROWS, parse_policies("dense"), None, EvalSettings(max_tokens=10))
