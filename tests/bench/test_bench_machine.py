"""What is said of the machine, and that its speed is measured in products of matrices."""

import re

import pytest
import torch
from tests.execution.eager import lively_hf
from tests.tiny import tiny_model

from redknot.bench import machine
from redknot.bench.machine import describe_machine, layer_factor, matmul_rate
from redknot.bench.records import Spread
from redknot.bench.tables import as_csv
from redknot.models.byte_tokenizer import byte_tokenizer
from redknot.models.loading import wrap_model

CPU = torch.device("cpu")


def test_the_record_names_machine_versions_and_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    found = describe_machine(CPU, None)
    assert {"device", "torch", "triton", "transformers", "python", "redknot"} <= set(found)
    assert re.match(r"[0-9a-f]{40}( with changes)?$|unknown$", found["commit"])
    assert describe_machine(CPU, "abc")["commit"] == "abc"

    def no_git(*_: object, **__: object) -> None:
        raise FileNotFoundError("git")

    monkeypatch.setattr(machine.subprocess, "run", no_git)
    assert describe_machine(CPU, None)["commit"] == "unknown"


def test_the_rate_counts_all_operations_of_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([4.0, 2.0, 3.0])
    monkeypatch.setattr(machine, "seconds_of", lambda call: next(seconds))
    assert matmul_rate(CPU, torch.bfloat16, repeats=3) == 2 * 2048**3 / 2.0


def test_only_a_cut_model_is_extrapolated() -> None:
    assert layer_factor(tiny_model()) is None
    cut = wrap_model(lively_hf(), byte_tokenizer(), "mistral-7b-v0.3[2 of 32 layers]")
    assert layer_factor(cut) == 16.0


def test_a_spread_has_median_and_ends() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0, 3)
    spread = Spread.of([float(value) for value in range(101)], (20, 80))
    assert (spread.median, spread.low, spread.high) == (50.0, 20.0, 80.0)


def test_csv_has_every_name_once() -> None:
    text = as_csv([{"a": 1, "b": None}, {"a": "x,y", "c": 2.5}])
    assert text == 'a,b,c\n1,,\n"x,y",,2.5\n'
