"""Traffic: the load is what it says, and every figure follows from what happened."""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
from tests.bench.conftest import open_bench

from redknot.bench.context import Bench
from redknot.bench.prompts import PromptShape
from redknot.bench.records import TrafficReport, TrafficRow
from redknot.bench.setting import parse_settings
from redknot.bench.traffic import Documents, TrafficSettings, traffic, whole_documents
from redknot.cli import main
from redknot.engine.engine import Engine
from redknot.engine.messages import Ended, Output, Refused, Submit
from redknot.errors import InputError

SHAPE = whole_documents(PromptShape(tokens=400, segment_tokens=90))
HOW = TrafficSettings(requests=6, documents=6, new_tokens=5, segment_tokens=90)
SETTINGS = parse_settings("prefix,reuse")


@pytest.fixture
def loaded() -> Bench:
    bench = open_bench(3000)
    bench.build(Documents.of(bench, SHAPE, HOW.documents).as_request())
    return bench


@pytest.fixture(autouse=True)
def _any_plan_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a clock says of a tiny model decides nothing here."""
    monkeypatch.setattr("redknot.execution.planner.WORTH", 1e9)


class Watched:
    """What engines are asked and tell."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.open: list[int] = []
        self.submits: dict[str, list[Submit]] = {}
        running: set[str] = set()
        submit, turn = Engine.submit, Engine.turn

        def submitting(engine: Engine, request: Submit) -> Refused | None:
            running.add(request.request_id)
            self.open.append(len(running))
            self.submits.setdefault(engine.intake.policy.describe(), []).append(request)
            return submit(engine, request)

        def turning(engine: Engine) -> Output | None:
            output = turn(engine)
            for ended in output.ended if output is not None else ():
                running.discard(ended.request_id)
            return output

        patch.setattr(Engine, "submit", submitting)
        patch.setattr(Engine, "turn", turning)


def rows_of(bench: Bench, clients: list[int]) -> list[TrafficRow]:
    return list(traffic(bench, SHAPE, SETTINGS, clients, HOW))


def test_as_many_are_open_as_there_are_clients_and_all_settings_are_asked_the_same(
    loaded: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(monkeypatch)
    rows_of(loaded, [3])
    assert max(watched.open) == 3
    assert set(watched.submits) == {"dense", "prefix", "reuse"}
    asked = [
        [(submit.token_ids, submit.spans) for submit in one] for one in watched.submits.values()
    ]
    assert asked[0] == asked[1] == asked[2]
    assert len(asked[0]) == 3 + HOW.requests  # one each that nobody measures
    assert len({tuple(ids) for ids, _ in asked[0]}) == len(asked[0])
    assert all(len(ids) == SHAPE.tokens for ids, _ in asked[0])


def test_figures_follow_from_what_happened(loaded: Bench) -> None:
    found = rows_of(loaded, [1, 2])
    assert [(row.clients, row.name) for row in found] == [
        (clients, name) for clients in (1, 2) for name in ("dense", "prefix", "reuse")
    ]
    for row, dense in zip(found, [found[0]] * 3 + [found[3]] * 3, strict=True):
        assert row.requests == row.ttft_seconds.n == HOW.requests
        assert row.token_seconds.n == HOW.requests * (HOW.new_tokens - 1)
        assert row.requests_per_second * row.seconds == pytest.approx(HOW.requests)
        assert row.tokens_per_second * row.seconds == pytest.approx(HOW.requests * HOW.new_tokens)
        assert 0 < row.ttft_seconds.low <= row.ttft_seconds.high < row.seconds
        assert row.ttft_ratio == dense.ttft_seconds.median / row.ttft_seconds.median
        assert row.tokens_per_second_ratio == row.tokens_per_second / dense.tokens_per_second
        assert row.preemptions == 0
    for dense, prefix, reuse in (found[:3], found[3:]):
        assert dense.cached_share == 0
        assert SHAPE.prefix / SHAPE.tokens - 0.01 <= prefix.cached_share < reuse.cached_share
        # The prefix is known from the request before, and only the question and the last row run.
        assert reuse.cached_share == pytest.approx(1 - (SHAPE.question / SHAPE.tokens), abs=0.01)


def test_a_request_that_fails_is_no_answer(loaded: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Engine.turn

    def failing(engine: Engine) -> Output | None:
        output = real(engine)
        if output is None or not output.ended:
            return output
        wrong = [
            Ended(request_id=one.request_id, reason="error", message="no") for one in output.ended
        ]
        return Output(ended=tuple(wrong))

    monkeypatch.setattr(Engine, "turn", failing)
    with pytest.raises(RuntimeError, match="error: no"):
        rows_of(loaded, [1])


def test_prompts_are_documents_of_the_pool_in_another_order_each_time(loaded: Bench) -> None:
    documents = Documents.of(loaded, SHAPE, HOW.documents)

    def some(seed: int) -> Iterator[tuple[list[int], ...]]:
        for request in islice(documents.requests(loaded, SHAPE, seed), 8):
            assert request.token_ids[: SHAPE.prefix] == tuple(documents.prefix)
            yield tuple(request.segments())

    orders = list(some(1))
    pool = [tuple(segment) for segment in documents.segments]
    for segments in orders:
        assert len({tuple(segment) for segment in segments}) == len(SHAPE.segments)
    whole = [segment for segments in orders for segment in segments]
    assert {tuple(segment) for segment in whole} <= set(pool)
    assert len({str(segments) for segments in orders}) > 1
    assert list(some(1)) == orders != list(some(2))


def test_too_few_documents_are_refused(loaded: Bench) -> None:
    with pytest.raises(InputError, match="4 documents out of 3"):
        Documents.of(loaded, SHAPE, 3)


def test_the_command_writes_what_show_reads(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report, flat, picture = (tmp_path / name for name in ("t.json", "t.csv", "t.png"))
    command = ["bench", "traffic", folder, "--tokens", "300", "--segment-tokens", "64"]
    command += ["--documents", "5", "--clients", "1,2", "--requests", "2", "--new-tokens", "3"]
    command += ["--pool-gib", "0.02", "--settings", "prefix", "--json", str(report)]
    assert main([*command, "--csv", str(flat), "--picture", str(picture)]) == 0
    found = json.loads(report.read_text())
    assert found["benchmark"] == TrafficReport.__struct_config__.tag
    assert found["tokens"] == 39 + 4 * 64 + 64
    assert [row["clients"] for row in found["rows"]] == [1, 1, 2, 2]
    assert len(flat.read_text().splitlines()) == 5
    assert picture.stat().st_size > 1000
    capsys.readouterr()
    assert main(["bench", "show", str(report)]) == 0
    assert "requests/s" in capsys.readouterr().out
