"""The gate measures, judges by the limit, and trusts only its own whole files."""

import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.execution.eager import lively_session
from tests.tiny import tiny_session

from redknot.engine.config import GateConfig
from redknot.errors import InputError
from redknot.evaluation import gate
from redknot.evaluation.data import Row, RowDocument
from redknot.evaluation.gate import GateFigures, GateResult, run_gate
from redknot.evaluation.gate_rows import rows_for_gate
from redknot.execution import ExecutionSettings
from redknot.execution.session import Session
from redknot.heads import HeadClass, HeadMap, HeadRule
from redknot.recovery.policies import Dense, Duo, Prefix, Reuse, parse_policy

TEXT = "a house of red stone stood by the river "
ROWS = [
    Row(
        "What of?",
        ("stone " * 30,),
        (RowDocument(TEXT * 3, "A"), RowDocument(f"{n} {TEXT}" * 3)),
        id=f"row-{n}",
    )
    for n in range(3)
]
LIMITS = GateConfig(agreement=0.5, prompts=2)
FIGURES = GateFigures(
    prompts=4,
    agreement=0.93,
    kl=0.031,
    floor_agreement=1.0,
    floor_kl=-1e-9,
    flops_share=0.3,
    seconds=7.5,
)


def measured(policy: str = "reuse", session: Session | None = None, **options: Any) -> GateResult:
    given_ = {"head_map": None, "rows": ROWS, "limits": LIMITS, "cache_folder": None} | options
    return run_gate(session or lively_session(), parse_policy(policy), **given_)


def figures(result: GateResult) -> GateFigures:
    """Without the time they took."""
    assert result.figures is not None
    return msgspec.structs.replace(result.figures, seconds=0.0)


@pytest.fixture(scope="module")
def reuse() -> GateResult:
    return measured()


def test_reuse_loses_something_and_dense_through_another_path_nothing(reuse: GateResult) -> None:
    found = figures(reuse)
    assert found.prompts == 2
    assert found.kl > 100 * abs(found.floor_kl)
    assert found.floor_agreement == 1
    assert found.agreement < 1
    assert found.flops_share < 0.9


def test_computing_every_stored_token_again_loses_nothing() -> None:
    found = figures(measured("epic:k=100000"))
    assert found.agreement == 1
    assert found.kl == pytest.approx(0, abs=1e-5)


def test_the_limit_decides(reuse: GateResult) -> None:
    reached = figures(reuse).agreement
    for limit, passes in ((reached, True), (reached + 1e-9, False)):
        assert measured(limits=GateConfig(agreement=limit, prompts=2)).passed == passes


@pytest.mark.parametrize("policy", [Dense(), Prefix()])
def test_policies_without_loss_need_no_run(policy: Dense) -> None:
    result = run_gate(lively_session(), policy, None, (), LIMITS, cache_folder=None)
    assert result.passed
    assert result.figures is None


def test_a_policy_like_dense_with_windows_is_measured() -> None:
    session = lively_session()
    local = HeadRule(head_class=HeadClass.LOCAL, window=8, sink=1)
    rules = tuple((local,) * layer.shape.num_groups for layer in session.model.adapter.layers)
    narrow = HeadMap(prefill=rules, decode=rules)
    result = run_gate(session, Duo(), narrow, ROWS, LIMITS, cache_folder=None)
    assert figures(result).kl > 0.01
    windowed = measured("dense:windows=all", session, head_map=narrow)
    assert figures(windowed).kl == figures(result).kl


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(InputError, match="head map"):
        measured("duo")
    long = msgspec.structs.replace(ROWS[0], documents=(RowDocument(TEXT * 400),))
    with pytest.raises(InputError, match="no row gives a prompt"):
        measured(rows=[long])
    with pytest.raises(InputError, match="1 prompt"):
        measured(limits=GateConfig(prompts=0))


def test_the_session_stays_as_it_was() -> None:
    session = lively_session()
    prompt = session.tokeniser.prompt(ROWS[2].as_documents(), ROWS[2].question)
    session.build_missing(prompt)
    session.prefill(prompt, Prefix())
    keys, before = session.store.keys(), session.look_up(prompt).layout
    assert before.exact == len(prompt) - 1
    measured(session=session)
    assert session.store.keys() == keys
    after = session.look_up(prompt).layout
    assert (after.exact, after.segments) == (before.exact, before.segments)


def pooled(pages: int) -> Session:
    """With a pool of fixed size, as a server has."""
    return Session(lively_session().model, settings=ExecutionSettings(num_pages=pages))


def test_no_second_pool_is_made_beside_a_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which takes what the device has."""
    made: list[int] = []
    real = gate.evaluate

    def watched(session: Session, *args: Any) -> Any:
        made.append(session.executor.storage.pool.num_pages)
        return real(session, *args)

    monkeypatch.setattr(gate, "evaluate", watched)
    assert measured(session=pooled(1 << 15)).figures is not None
    assert made[0] < 1 << 10


def test_figures_are_read_again_whatever_the_limit(tmp_path: Path, reuse: GateResult) -> None:
    folder = tmp_path / "new" / "gate"
    first = measured(cache_folder=folder)
    again = measured(cache_folder=folder, limits=GateConfig(agreement=1, prompts=2))
    assert (first.cached, again.cached) == (False, True)
    assert again.figures == first.figures
    assert figures(first) == figures(reuse)
    assert not again.passed
    assert len(list(folder.iterdir())) == 1


def templated(template: str) -> Session:
    """With another chat template."""
    session = lively_session()
    session.model.tokenizer.chat_template = template
    return session


CHANGES: dict[str, dict[str, Any]] = {
    "policy": {"policy": "reuse:windows=none"},  # the same
    "hyper-parameter": {"policy": "epic:k=3"},
    "rows": {"rows": ROWS[1:]},
    "prompts": {"limits": GateConfig(prompts=1)},
    "weights": {"session": tiny_session(seed=1)},
    "anchor": {"session": lively_session(add_bos=False)},
    "another salt": {"session": lively_session(salt="tenant")},  # the same
    "pool": {"session": pooled(777)},  # the same: what is free at a start
    "chat template": {"session": templated("{{ messages }}")},
}
SAME = ("policy", "another salt", "pool")


@pytest.mark.parametrize("change", CHANGES)
def test_another_ground_is_measured_anew(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "_measure", lambda *_: FIGURES)
    measured(cache_folder=tmp_path)
    assert measured(cache_folder=tmp_path, **CHANGES[change]).cached == (change in SAME)


def test_another_map_type_or_release_is_measured_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "_measure", lambda *_: FIGURES)
    session = lively_session()
    rules = tuple((HeadRule(),) * layer.shape.num_groups for layer in session.model.adapter.layers)
    bare, named = (
        HeadMap(prefill=rules, decode=rules),
        HeadMap(prefill=rules, decode=rules, model="x"),
    )
    for head_map in (None, bare, named):
        found = [measured(head_map=head_map, cache_folder=tmp_path).cached for _ in range(2)]
        assert found == [False, True]
    half = lively_session()
    half.model.hf.bfloat16()
    assert not measured(session=Session(half.model), cache_folder=tmp_path).cached
    monkeypatch.setattr(gate, "__version__", "another")
    assert not measured(cache_folder=tmp_path).cached


@given(st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_file_is_a_miss(tmp_path: Path, data: st.DataObject) -> None:
    place = tmp_path / "file.json"
    gate._write(place, "key", FIGURES)
    whole = place.read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    kind = data.draw(st.sampled_from(["cut", "flip", "insert"]))
    if kind == "cut":
        changed = whole[:at]
    else:
        byte = data.draw(st.integers(0, 255))
        changed = whole[:at] + bytes([byte]) + whole[at + (kind == "flip") :]
    place.write_bytes(changed)
    assert gate._read(place, "key") in (None, FIGURES)
    place.write_bytes(whole.replace(b"0.93", b"0.99"))
    assert gate._read(place, "key") is None


@pytest.mark.parametrize(
    "content", [b"", b"null", b"[]", b'{"figures":1}', b"\xff\xfe", b"[" * 9999]
)
def test_a_foreign_file_is_a_miss_and_is_replaced(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "_measure", lambda *_: FIGURES)
    measured(cache_folder=tmp_path)
    (place,) = tmp_path.iterdir()
    place.write_bytes(content)
    assert not measured(cache_folder=tmp_path).cached
    assert measured(cache_folder=tmp_path).cached
    assert list(tmp_path.iterdir()) == [place]


def test_a_file_of_another_ground_is_a_miss(tmp_path: Path) -> None:
    gate._write(tmp_path / "a", "one", FIGURES)
    assert gate._read(tmp_path / "a", "one") == FIGURES
    assert gate._read(tmp_path / "a", "two") is None


def test_a_folder_that_cannot_be_written_costs_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(gate, "_measure", lambda *_: FIGURES)
    (tmp_path / "file").write_text("no folder")
    with caplog.at_level(logging.WARNING):
        assert measured(cache_folder=tmp_path / "file").figures == FIGURES
    assert "not kept" in caplog.text


def test_nothing_half_written_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> int:
        with path.open("wb") as file:
            file.write(content[:10])
        raise OSError("no space")

    monkeypatch.setattr(Path, "write_bytes", full)
    gate._write(tmp_path / "a", "key", FIGURES)
    assert not list(tmp_path.iterdir())


def test_the_summary_has_the_figures_on_one_line() -> None:
    result = GateResult(limit=0.85, figures=FIGURES)
    assert result.summary == (
        "agreement 0.93 >= 0.85 over 4 prompts, KL 0.031 (dense with itself 1.00, KL 0.000)"
    )
    near = msgspec.structs.replace(FIGURES, agreement=0.8496)
    assert GateResult(limit=0.85, figures=near).summary.startswith("agreement 0.8496 < 0.85 over")


def test_broken_logits_never_pass() -> None:
    broken = msgspec.structs.replace(FIGURES, agreement=1.0, kl=float("nan"))
    assert not GateResult(limit=0.0, figures=broken).passed
    assert "KL nan" in GateResult(limit=0.0, figures=broken).summary


def test_the_rows_that_ship_are_answered_by_their_own_passages() -> None:
    rows = rows_for_gate()
    assert len(rows) >= GateConfig().prompts
    assert len({row.id for row in rows}) == len(rows)
    session = tiny_session()  # a byte is a token, four of them one of the embedded model's
    for row in rows:
        assert len(row.documents) >= 3
        assert all(document.title and document.text for document in row.documents)
        assert 2_800 < len(session.tokeniser.prompt(row.as_documents(), row.question)) < 10_000
        text = " ".join(document.text for document in row.documents).lower()
        words = [word.strip(",;").lower() for word in row.answers[0].split()]
        assert all(word in text for word in words), row.id


def test_own_rows_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    file.write_bytes(msgspec.json.encode(ROWS[0]) + b"\n")
    (row,) = rows_for_gate(str(file))
    assert (row.question, row.documents) == (ROWS[0].question, ROWS[0].documents)
    with pytest.raises(InputError, match="missing"):
        rows_for_gate(str(tmp_path / "missing.jsonl"))


def test_the_policy_itself_is_measured_not_the_planners_choice() -> None:
    """On prompts so short that the planner would run dense."""
    assert figures(measured(Reuse().describe())).flops_share < 1
