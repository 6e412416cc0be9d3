"""Capacity: who is admitted, by an independent count of pages, and that all pages come back."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.bench.conftest import open_bench

from redknot.bench.capacity import NOTE, CapacitySettings, capacity, capacity_settings
from redknot.bench.context import Bench
from redknot.bench.machine import GIB
from redknot.bench.prompts import PromptShape
from redknot.bench.records import CapacityRow
from redknot.bench.room import pool_pages
from redknot.bench.timed import Runner
from redknot.cli import main
from redknot.execution.batch import DecodeBatch
from redknot.recovery.policies import parse_policy

PAGE, ROWS, WINDOW, SINK = 16, 4 * 2, 32, 4
POLICY = parse_policy("question_drop:first=0.4:then=0.2:windows=all")


def rows_of(bench: Bench, tokens: int, shares: list[float], new: int) -> list[CapacityRow]:
    shape = PromptShape(tokens=tokens, segment_tokens=90)
    bench.build(bench.ready(shape))
    return list(capacity(bench, shape, capacity_settings(POLICY, shares), new))


def kept(tokens: int, globals_: int) -> int:
    """Pages that a request keeps: position by position, what a later row may see."""
    local = {j // PAGE for j in range(tokens) if j < SINK or j > tokens - WINDOW}
    last = {tokens // PAGE} if tokens % PAGE else set()  # it is being filled
    return globals_ * -(-tokens // PAGE) + (ROWS - globals_) * len(local | last)


def admitted(pool: int, tokens: int, new: int, globals_: int) -> int:
    """Requests one by one, each with room for its whole prompt, and growth for all."""
    whole = ROWS * -(-tokens // PAGE)
    growth = ROWS * (-(-(tokens + new) // PAGE) - -(-tokens // PAGE))
    held = count = 0
    while pool - held >= whole:
        if pool - held - kept(tokens, globals_) < growth * (count + 1) + 1:
            break
        held += kept(tokens, globals_)
        count += 1
    return count


@pytest.mark.parametrize(
    ("tokens", "pool", "new"), [(400, 700, 4), (400, 801, 40), (410, 417, 4), (410, 650, 40)]
)
def test_residents_are_those_that_an_independent_count_of_pages_admits(
    tokens: int, pool: int, new: int
) -> None:
    bench = open_bench(pool)
    found = rows_of(bench, tokens, [0.25, 0.5], new)
    assert [row.share for row in found] == [None, 0.25, 0.5]
    for row, globals_ in zip(found, (8, 2, 4), strict=True):
        assert row.residents == admitted(pool, tokens, new, globals_)
        assert row.pages_each == kept(tokens, globals_)
        assert row.pages_in_use == row.residents * kept(tokens, globals_)
        assert row.pages_left == 0
        assert row.skipped is None
        assert row.stopped_by.startswith(("prefill: ", "new tokens: "))
        assert row.step_seconds.n == new - 2
        assert row.prefill_seconds.n == row.residents
        assert row.residents_ratio == row.residents / found[0].residents
        assert row.tokens_per_second_ratio == row.tokens_per_second / found[0].tokens_per_second
        assert row.peak_bytes is None
    assert found[1].residents >= found[2].residents >= found[0].residents
    bench.session.executor.storage.pool.check([])


def test_a_pool_that_holds_none_says_so() -> None:
    for row in rows_of(open_bench(180), 400, [0.5], 4):
        assert row.residents == 0
        assert row.tokens_per_second is None
        assert row.residents_ratio is None
        assert "pages asked for" in row.stopped_by
        assert row.pages_left == 0


def test_requests_differ_but_share_segments_and_are_the_same_for_all_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: dict[str, list[Any]] = {}
    real = Runner.run

    def watched(self: Runner, request: Any, **options: Any) -> Any:
        timed = real(self, request, **options)
        assert not session.look_up(request.prompt(list(request.token_ids))).missing
        assert timed.prefilled.layout.segments == request.spans
        asked.setdefault(self.setting.label, []).append(request)
        return timed

    monkeypatch.setattr(Runner, "run", watched)
    bench = open_bench(1000)
    session = bench.session
    found = rows_of(bench, 400, [0.25], 4)
    dense, windowed = asked.values()
    assert len({request.token_ids for request in windowed}) == len(windowed) > len(dense)
    assert windowed[: len(dense)] == dense
    for row, requests in zip(found, (dense, windowed), strict=True):
        assert len(requests) - row.residents in (0, 1)  # the last may be refused after its prefill
    assert "windows" not in found[0].name
    assert found[1].name == POLICY.describe() + "@0.25"


def test_all_residents_decode_all_new_tokens_from_their_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lengths: list[list[int]] = []
    fed: list[list[int]] = []
    real = DecodeBatch.step

    def watched(self: DecodeBatch, tokens: list[int]) -> torch.Tensor:
        fed.append(list(tokens))
        logits = real(self, tokens)
        lengths.append(list(self.lengths))
        return logits

    monkeypatch.setattr(DecodeBatch, "step", watched)
    rows = rows_of(open_bench(1000), 400, [], 20)
    count = rows[0].residents
    assert lengths == [[400 + step] * count for step in range(1, 21)]
    assert len(fed) == 20


def test_a_refused_request_that_keeps_pages_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    real, kept_alive = Runner.run, []

    def leaks(self: Runner, request: Any, **options: Any) -> Any:
        storage = self.session.executor.storage
        if len(kept_alive) == 1:
            kept_alive.append(storage.pool.allocate(storage.pool.num_free - 1))
        timed = real(self, request, **options)
        kept_alive.append(0)
        return timed

    monkeypatch.setattr(Runner, "run", leaks)
    with pytest.raises(RuntimeError, match="kept"):
        rows_of(open_bench(1000), 400, [0.25], 4)


def test_the_pool_is_what_was_asked_for_or_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = open_bench().session.model.adapter
    page_bytes = 16 * 2 * 16 * 4
    assert pool_pages(adapter, 0.01, 8.0) == int(0.01 * GIB) // page_bytes

    class OnGpu:
        layers, dtype = adapter.layers, adapter.dtype
        device = torch.device("cuda")

    monkeypatch.setattr("redknot.bench.room.release", lambda device: None)
    monkeypatch.setattr("redknot.bench.room.page_storage", lambda _: Bench)
    monkeypatch.setattr(Bench, "page_bytes", 1 << 20, raising=False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10 * GIB, 99 * GIB))
    assert pool_pages(OnGpu(), None, 8.0) == 2 * 1024  # type: ignore[arg-type]


def test_dense_keeps_all_and_settings_window_later_rows() -> None:
    dense, share = capacity_settings(POLICY, [0.5])
    assert not dense.policy.windows.on_decode
    assert dense.share is None
    assert share.policy == POLICY
    assert CapacitySettings().new_tokens == 64


def test_the_command_writes_residents(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {kind: tmp_path / f"c.{kind}" for kind in ("json", "csv", "png")}
    command = ["bench", "capacity", folder, "--tokens", "400", "--segment-tokens", "90"]
    command += ["--shares", "0.5", "--new-tokens", "4", "--pool-gib", "0.0014", "--window", "32"]
    command += ["--json", str(files["json"]), "--csv", str(files["csv"])]
    assert main([*command, "--picture", str(files["png"])]) == 0
    assert NOTE[:40] in capsys.readouterr().out
    found = json.loads(files["json"].read_text())
    assert found["num_pages"] == int(0.0014 * GIB) // found["page_bytes"]
    assert found["build_seconds"] > 0
    assert [row["residents"] > 0 for row in found["rows"]] == [True, True]
    assert len(files["csv"].read_text().splitlines()) == 3
    assert files["png"].read_bytes().startswith(b"\x89PNG")
