"""Time to first token: what is within the time, who runs when, and what is written down."""

import gc
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.bench.conftest import PEAK
from tests.bench.test_bench_settings import report

from redknot.bench import contenders as contenders_module
from redknot.bench.contenders import Contender, compete
from redknot.bench.context import Bench
from redknot.bench.fidelity import FidelityReports
from redknot.bench.judged import judge_length
from redknot.bench.peers import Peers
from redknot.bench.prompts import PromptShape, Request
from redknot.bench.records import Spread, TtftLength, TtftRow, Work
from redknot.bench.setting import DENSE, parse_settings
from redknot.bench.timed import run_peer
from redknot.bench.ttft import TtftSettings, compared, shapes_of, ttft
from redknot.cli import main
from redknot.execution.executor import Executor
from redknot.execution.planner import Decision, Planner
from redknot.execution.session import Session
from redknot.segments import Prompt
from redknot.segpaged import OutOfPages

SHAPE = PromptShape(tokens=400, segment_tokens=90)
CPU = torch.device("cpu")
PAUSE = 0.05


def measured(
    bench: Bench, settings: str, peers: tuple[str, ...] = ("sdpa",), **how: Any
) -> list[TtftLength]:
    chosen, options = parse_settings(settings), TtftSettings(segment_tokens=90, **how)
    planner = Planner(bench.session.executor) if options.asks_planner else None
    shapes = shapes_of(bench, [400, 250], 90)
    rivals = Peers.of(bench.session.executor, peers, None)
    return list(ttft(bench, shapes, chosen, rivals, options, planner))


def slow(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    """Make one step of a request take `PAUSE` longer."""
    real: Callable[..., Any] = getattr(owner, name)

    def later(*arguments: Any, **options: Any) -> Any:
        time.sleep(PAUSE)
        return real(*arguments, **options)

    monkeypatch.setattr(owner, name, staticmethod(later) if name == "of_ids" else later)


@pytest.mark.parametrize(
    ("owner", "name", "stage"),
    [
        (Prompt, "of_ids", "lookup"),
        (Session, "look_up", "lookup"),
        (Planner, "decide", "plan"),
        (Executor, "_relocated", "relocate"),
        (Executor, "_trip", "probe"),
        (Executor, "_in_chunks", "recover"),
        (torch.Tensor, "argmax", "sample"),
    ],
)
def test_every_step_from_ids_to_the_first_tokens_id_is_within_the_time(
    owner: Any, name: str, stage: str, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = bench.ready(SHAPE)
    bench.build(request)
    (setting,) = parse_settings("question_drop")
    planner = Planner(bench.session.executor)
    monkeypatch.setattr(Planner, "decide", lambda _, l, policy, m: Decision(policy, "always"))
    runner = bench.runner(setting, planner)
    runner.run(request)
    slow(monkeypatch, owner, name)
    timed = runner.run(request)
    stages = timed.prefilled.seconds
    assert timed.seconds > PAUSE
    assert stages[stage] > PAUSE
    assert sum(stages.values()) <= timed.seconds < sum(stages.values()) + PAUSE / 2
    assert timed.token == int(timed.prefilled.logits.argmax())


@pytest.mark.parametrize("name", ["tensor", "Tensor.argmax"])
def test_a_peer_is_timed_alike(name: str, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    request = bench.ready(SHAPE)
    peer = Peers.of(bench.session.executor, ["sdpa"], None).ready["sdpa"]
    _, token = run_peer(peer, request, CPU)
    slow(monkeypatch, torch.Tensor if "." in name else torch, name.split(".")[-1])
    seconds, again = run_peer(peer, request, CPU)
    assert seconds > PAUSE
    timed = bench.runner(DENSE).run(request)
    assert token == again == timed.token


def test_nothing_of_the_prompt_but_its_segments_is_known_at_any_run(bench: Bench) -> None:
    request = bench.ready(SHAPE)
    bench.build(request)
    (setting,) = parse_settings("question_drop:first=0.4:then=0.2")
    for _ in range(3):
        prefilled = bench.runner(setting).run(request).prefilled
        assert prefilled.layout.exact == 0
        assert prefilled.layout.segments == request.spans
        assert prefilled.executed.chunks[0][0].active[:39].tolist() == list(range(39))
    prefilled = bench.runner(DENSE).run(request).prefilled
    assert prefilled.layout.segments == ()


def test_pages_are_free_between_runs_without_a_collector(bench: Bench) -> None:
    request = bench.ready(SHAPE)
    bench.build(request)
    pool = bench.session.executor.storage.pool
    gc.disable()
    try:
        for setting in [DENSE, *parse_settings("question_drop,redknot:mass=0@0.5")]:
            timed = bench.runner(setting).run(request)
            assert pool.num_used
            del timed
            bench.session.beginnings.forget()
            assert not pool.num_used
    finally:
        gc.enable()


def test_contenders_run_by_turns_on_the_same_ids_after_the_same_warm_up(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[tuple[str, Request]] = []
    real = compete

    def watched(contenders: list[Contender], request: Request, *rest: Any) -> None:
        for one in contenders:
            run = one.run
            one.run = lambda r, one=one, run=run: (order.append((one.name, r)), run(r))[1]
        real(contenders, request, *rest)

    monkeypatch.setattr("redknot.bench.ttft.compete", watched)
    found = measured(bench, "question_drop,duo@0.5", repeats=2)
    names = ["dense", "dense (sdpa)", "question_drop", "duo@0.5"]
    assert [name for name, _ in order] == names * 3 * 2
    ids = [request.token_ids for _, request in order]
    assert len(set(ids[:12])) == len(set(ids[12:])) == 1
    assert [length.tokens for length in found] == [250, 400]
    assert [len(ids[0]), len(ids[-1])] == [250, 400]


def test_records_say_what_ran_and_how_fast_beside_the_best_dense(bench: Bench) -> None:
    for length in measured(bench, "reuse,redknot:mass=0:share=0.2@0.5", repeats=3):
        assert length.build_seconds > 0
        segment_tokens = sum(length.segments)
        assert segment_tokens == length.tokens - 39 - 64
        assert length.stored_bytes == segment_tokens * 4 * 2 * 2 * 16 * 4
        by_name = {row.name: row for row in length.rows}
        best = by_name[length.best_dense]
        medians = [by_name[name].seconds.median for name in ("dense", "dense (sdpa)")]
        assert best.seconds.median == min(medians)
        assert best.speed_up == 1
        for row in length.rows:
            assert row.seconds.n == 3
            assert row.seconds.low <= row.seconds.median <= row.seconds.high
            assert row.warm_up_seconds > 0
            assert row.speed_up == best.seconds.median / row.seconds.median
            assert row.extrapolated_seconds is None
            assert row.skipped is None
            if row.kind != "peer":
                assert row.work.floor_seconds == row.work.flops / PEAK
                assert set(row.stages) >= {"lookup", "relocate", "recover", "sample"}
        reuse = by_name["reuse"]
        assert reuse.achieved == reuse.speed_up * reuse.work.flops_share
        assert by_name["dense"].achieved is None
        assert by_name["dense"].token == by_name["dense (sdpa)"].token
        fresh = length.tokens - segment_tokens
        assert reuse.work.flops < by_name["dense"].work.flops * fresh / length.tokens * 1.5
        assert by_name["redknot:mass=0@0.5"].share == 0.5


def test_cold_nothing_is_stored_and_the_planner_decides(bench: Bench) -> None:
    for length in measured(bench, "reuse", cold=True, repeats=1):
        assert length.build_seconds is None
        assert length.stored_bytes == 0
        dense, _, reuse = length.rows
        assert dense.work.decision is None
        assert reuse.work.policy == "dense"
        assert "stored" in reuse.work.decision
        assert reuse.work.flops == dense.work.flops
        assert "plan" in reuse.stages


def test_what_was_taken_over_is_printed_and_cold_runs_take_over_nothing(bench: Bench) -> None:
    """PF-03: a second measurement of the same prompts in one process finds nothing either."""
    for _ in range(2):
        for length in measured(bench, "reuse", cold=True, repeats=2):
            assert [row.work.cached_tokens for row in length.rows if row.work] == [0, 0]
    for length in measured(bench, "reuse", repeats=1):
        dense, reuse = (row.work for row in length.rows if row.work)
        fresh = length.tokens - sum(length.segments)
        assert (dense.cached_tokens, reuse.cached_tokens) == (0, length.tokens - fresh)


def test_host_segments_and_checksums_give_the_same_token(bench: Bench) -> None:
    plain = measured(bench, "reuse", repeats=1)
    host = Bench.open(bench.session.model, bench.maps, host=True, verify=True)
    assert [row.token for one in measured(host, "reuse", repeats=1) for row in one.rows] == [
        row.token for one in plain for row in one.rows
    ]
    assert host.store.usage().hits > 0


@pytest.mark.parametrize("kind", ["setting", "peer"])
def test_what_does_not_fit_is_skipped_with_its_reason(kind: Any) -> None:
    calls: list[str] = []

    def fails(request: Request) -> None:
        calls.append("fails")
        if calls.count("fails") == 2:
            raise OutOfPages(7, 3) if kind == "setting" else RuntimeError("no kernel\nline 2")
        one.seconds.append(1.0)

    one, other = Contender("a", kind, fails), Contender("b", "dense", lambda r: calls.append("b"))
    compete([one, other], Request((1,), (), (0, 1)), 3, CPU)
    assert calls == ["fails", "b", "fails", "b", "b", "b"]
    row = one.row()
    assert row.seconds is None
    assert row.skipped == ("7 pages asked for, 3 can be had" if kind == "setting" else "no kernel")


def test_an_error_of_ours_is_not_swallowed() -> None:
    def fails(request: Request) -> None:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        compete([Contender("a", "setting", fails)], Request((1,), (), (0, 1)), 1, CPU)


def test_seconds_of_some_layers_are_extrapolated_apart() -> None:
    one = Contender("a", "setting", lambda r: None, seconds=[9.0, 1.0, 2.0, 6.0])
    one.work = Work(10, 0.25, 0.1, "a")
    best = Contender("dense", "dense", lambda r: None, seconds=[9.0, 8.0])
    row = compared(one, best, 64 / 4)
    assert row.seconds == Spread(2.0, 1.0, 6.0, 3)
    assert row.extrapolated_seconds == 32.0
    assert row.warm_up_seconds == 9.0
    assert row.speed_up == 4.0
    assert row.achieved == 1.0
    assert compared(one, None, None).speed_up is None


def test_a_setting_that_ran_dense_is_worth_what_dense_is(tmp_path: Path) -> None:
    reports = FidelityReports.read([report(tmp_path / "r.json", "m", None, "dense", "reuse")])
    rows = [
        TtftRow(name="reuse", kind="setting", work=Work(1, 1.0, 1.0, ran, "why"))
        for ran in ("reuse", "dense")
    ]
    length = TtftLength(
        tokens=1, segments=(), build_seconds=None, stored_bytes=0, best_dense="dense", rows=rows
    )
    found = judge_length(length, reports).rows
    assert [row.fidelity["m"].agreement.mean for row in found] == [0.91, 0.9]


def test_the_command_writes_report_rows_and_picture_whole(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fidelity = report(tmp_path / "f.json", "judge", "0.5/0.5", "reuse", em=True)
    files = {kind: tmp_path / f"t.{kind}" for kind in ("json", "csv", "png")}
    command = ["bench", "ttft", folder, "--tokens", "400,250", "--segment-tokens", "90"]
    command += ["--settings", "reuse,duo@0.5", "--repeats", "1", "--window", "16"]
    command += ["--json", str(files["json"]), "--csv", str(files["csv"]), "--commit", "abc"]
    command += ["--picture", str(files["png"]), "--fidelity", str(fidelity), "--planned"]
    assert main(command) == 0
    found = json.loads(files["json"].read_text())
    assert found["environment"]["commit"] == "abc"
    assert {"device", "torch", "triton", "python", "transformers"} <= set(found["environment"])
    assert found["settings"]["window"] == "16"
    assert found["settings"]["planned"] == "True"
    assert found["matmul_flops_per_second"] > 0
    assert found["calibration_seconds"] > 0
    assert [length["tokens"] for length in found["lengths"]] == [250, 400]
    lines = files["csv"].read_text().splitlines()
    assert len(lines) == 1 + 2 * 4
    assert lines[0].startswith("model,tokens,name,kind,share")
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    assert not list(tmp_path.glob("*.part"))
    printed = capsys.readouterr().out
    assert "not measured" in printed
    assert "speed-up" in printed


def test_the_report_is_written_after_each_length(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = contenders_module.compete, []

    def breaks(*arguments: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("the machine went away")
        real(*arguments)

    monkeypatch.setattr("redknot.bench.ttft.compete", breaks)
    path = tmp_path / "t.json"
    command = ["bench", "ttft", folder, "--tokens", "250,400", "--repeats", "1"]
    with pytest.raises(RuntimeError, match="went away"):
        main([*command, "--settings", "reuse", "--json", str(path)])
    assert [length["tokens"] for length in json.loads(path.read_text())["lengths"]] == [250]


def test_a_model_of_some_layers_is_marked(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "t.json"
    command = ["bench", "ttft", folder, "--load-format", "dummy", "--layers", "1"]
    command += ["--tokens", "110", "--settings", "", "--repeats", "1", "--peers", "none"]
    assert main([*command, "--json", str(path)]) == 0
    (row,) = json.loads(path.read_text())["lengths"][0]["rows"]
    assert row["extrapolated_seconds"] == 4 * row["seconds"]["median"]
    assert "extrapolated" in capsys.readouterr().out
