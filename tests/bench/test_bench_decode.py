"""Decoding over random K/V: what a request keeps, who steps when, and that pages come back."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from redknot.bench.context import Bench
from redknot.bench.decode import decode, decode_settings, random_prompt
from redknot.bench.steps import FIRST_STEPS, Stepper
from redknot.cli import main
from redknot.execution import PromptCache
from redknot.execution.batch import DecodeBatch


@pytest.mark.parametrize("tokens", [304, 300], ids=["whole pages", "a part of a page"])
def test_settings_step_by_turns_in_pages_that_were_there(
    tokens: int, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[int] = []
    storage, step, planes = bench.session.executor.storage, Stepper.step, []

    def watched(self: Stepper) -> None:
        order.append(id(self))
        planes.append(storage.planes["key"])
        step(self)

    monkeypatch.setattr(Stepper, "step", watched)
    rows = list(decode(bench, tokens, decode_settings([0.25, 0.5]), [2], 30))
    assert len(order) == 3 * (30 + FIRST_STEPS)
    assert order == order[:3] * (30 + FIRST_STEPS)
    assert all(plane is planes[0] for plane in planes), "the storage grew within the time"
    assert not storage.pool.num_used
    assert [row.name for row in rows] == [
        "dense", "dense:windows=decode@0.25", "dense:windows=decode@0.5",
    ]  # fmt: skip
    seen = [1.0, 0.25 + 0.75 * 35 / tokens, 0.5 + 0.5 * 35 / tokens]  # 4 and the last 31
    assert [row.kv_share for row in rows] == pytest.approx(seen)
    pages = math.ceil(tokens / 16)
    assert rows[0].kv_bytes == 8 * pages * 16 * 2 * 16 * 4
    assert rows[0].kv_bytes > rows[2].kv_bytes > rows[1].kv_bytes
    for row in rows:
        spread = row.step_seconds
        assert spread.n == 30
        assert spread.low <= spread.median <= spread.high
        assert row.speed_up == rows[0].step_seconds.median / spread.median
        assert row.first_steps_seconds > 0


def test_the_rate_is_of_all_requests_after_the_first_steps() -> None:
    batch: Any = None
    stepper = Stepper(batch, [1, 2, 3], seconds=[9.0] * FIRST_STEPS + [0.1, 0.2, 0.3])
    assert stepper.tokens_per_second == pytest.approx(3 * 3 / 0.6)
    assert stepper.first_seconds == 9.0 * FIRST_STEPS
    assert stepper.spread.median == 0.2


def test_a_step_feeds_the_likeliest_tokens_back(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = bench.session.executor
    (setting,) = decode_settings([])
    cache = PromptCache.allocate(executor.adapter, 64, executor.storage)
    for plane in executor.storage.planes.values():
        plane.normal_()
    batch = DecodeBatch(executor, 1, 80)
    batch.add(random_prompt(bench, setting, cache))
    stepper, fed, likeliest = Stepper(batch, [5]), [], []
    step = batch.step

    def watched(tokens: list[int]) -> torch.Tensor:
        fed.append(tokens)
        logits = step(tokens)
        likeliest.append([int(logits[0].argmax())])
        return logits

    monkeypatch.setattr(batch, "step", watched)
    for _ in range(3):
        stepper.step()
    assert fed == [[5], *likeliest[:2]]
    assert stepper.tokens == likeliest[2]
    assert len(stepper.seconds) == 3


def test_a_batch_without_memory_is_skipped_and_the_next_runs(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = PromptCache.allocate
    calls: list[int] = []

    def fails(*arguments: Any) -> PromptCache:
        calls.append(1)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("no room\nfor this")
        return real(*arguments)

    monkeypatch.setattr(PromptCache, "allocate", fails)
    rows = list(decode(bench, 100, decode_settings([0.5]), [2, 1], 3))
    assert [(row.batch, row.skipped) for row in rows] == [
        (2, "no room"), (2, "no room"), (1, None), (1, None),
    ]  # fmt: skip
    assert not bench.session.executor.storage.pool.num_used


def test_the_command_says_that_kv_are_random(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {kind: tmp_path / f"d.{kind}" for kind in ("json", "csv", "pdf")}
    command = ["bench", "decode", folder, "--tokens", "200", "--shares", "0.5", "--batches", "1,2"]
    command += ["--steps", "3", "--json", str(files["json"]), "--csv", str(files["csv"])]
    assert main([*command, "--picture", str(files["pdf"])]) == 0
    assert "K/V are random" in capsys.readouterr().out
    assert len(json.loads(files["json"].read_text())["rows"]) == 4
    assert len(files["csv"].read_text().splitlines()) == 5
    assert files["pdf"].read_bytes().startswith(b"%PDF")
