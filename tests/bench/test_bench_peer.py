"""The dense peer computes what the executor's dense computes."""

import pytest
import torch
from tests.bench.conftest import open_bench
from tests.execution.eager import forward, lively_hf, rounding
from tests.tiny import random_ids

from redknot.bench.context import Bench
from redknot.bench.dense_attention import PEERS, PeerUnavailable, parse_peers, peer, sdpa
from redknot.bench.dense_peer import DensePeer
from redknot.bench.peers import Peers
from redknot.bench.prompts import PromptShape
from redknot.bench.records import Spread, TtftRow
from redknot.bench.setting import DENSE
from redknot.execution import layer
from redknot.execution.parts import Parts
from redknot.segments import Prompt

CPU = torch.device("cpu")


def dense_logits(bench: Bench, ids: torch.Tensor) -> torch.Tensor:
    return bench.session.prefill(Prompt.of_ids(ids.tolist(), []), DENSE.policy).logits


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen2-14/2", "llama-yarn", "llama-1"])
@pytest.mark.parametrize("block", [64, 16384], ids=["FFN in blocks", "FFN whole"])
def test_its_logits_are_those_of_the_executor(
    name: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer, "ROW_BLOCK", block)
    bench, ids, hf = open_bench(name=name), random_ids(200), lively_hf(name)
    got = DensePeer(bench.session.executor, sdpa).prefill(ids)
    own, truth = dense_logits(bench, ids), forward(hf, ids).logits[-1]
    bound = rounding(hf, len(ids)) * truth.abs().max()
    assert (got.double() - truth).abs().max() <= bound
    assert (got - own).abs().max() <= 2 * bound


def test_its_keys_and_values_stay_and_stand_in_free_pages() -> None:
    bench, ids, hf = open_bench(), random_ids(160), lively_hf()
    executor = bench.session.executor
    one = DensePeer(executor, sdpa)
    truth, bound = forward(hf, ids), rounding(hf, len(ids))
    bench.ready(PromptShape(tokens=160))
    one.prefill(ids)
    for name, states in (("key", truth.keys), ("value", truth.values)):
        kept = executor.storage.planes[name].view(-1)[: 4 * 2 * 160 * 16].view(4, 2, 160, 16)
        for index, state in enumerate(states):
            assert (kept[index].double() - state).abs().max() <= bound * state.abs().max()
    held = executor.storage.pool.allocate(1)
    before = executor.storage.planes["key"].zero_().clone()
    one.prefill(random_ids(160, seed=1))
    assert torch.equal(executor.storage.planes["key"], before), "pages in use were overwritten"
    executor.storage.pool.free(held)
    longer = random_ids(800)  # more than the pages hold
    own = dense_logits(bench, longer)
    assert (one.prefill(longer) - own).abs().max() <= 2 * rounding(hf, 800) * own.abs().max()


def test_compiled_parts_keep_the_same_state() -> None:
    bench, ids = open_bench(), random_ids(100)
    eager = DensePeer(bench.session.executor, sdpa).prefill(ids)
    bench.session.executor.parts = Parts.compiled("aot_eager")
    with pytest.MonkeyPatch.context() as patch:
        compile_ = torch.compile
        patch.setattr(torch, "compile", lambda f, **how: compile_(f, **how, backend="aot_eager"))
        compiled = DensePeer(bench.session.executor, sdpa)
    assert torch.equal(compiled.prefill(ids), eager)


def test_a_model_with_a_window_of_its_own_has_no_peer() -> None:
    bench = open_bench(name="mistral")
    found = Peers.of(bench.session.executor, ["sdpa"], None)
    assert not found.ready
    assert "sliding window" in found.unavailable["sdpa"]


@pytest.mark.parametrize("name", ["fa3", "fa4", "cudnn"])
def test_a_peer_of_a_gpu_is_left_out_with_its_reason(name: str) -> None:
    with pytest.raises(PeerUnavailable, match=name):
        peer(name, CPU, torch.bfloat16, None)
    found = Peers.of(open_bench().session.executor, [name, "sdpa"], None)
    assert list(found.ready) == ["sdpa"]
    assert name in found.unavailable[name]


def test_peers_by_name() -> None:
    assert parse_peers(None, CPU) == ["sdpa"]
    assert parse_peers(None, torch.device("cuda")) == ["fa3", "fa4", "cudnn"]
    assert parse_peers("none", CPU) == []
    assert parse_peers("sdpa,fa3,sdpa", CPU) == ["sdpa", "fa3"]
    assert set(PEERS) == {"fa3", "fa4", "cudnn", "sdpa"}


def row(name: str, seconds: float | None) -> TtftRow:
    spread = None if seconds is None else Spread.of([seconds])
    return TtftRow(name=name, kind="peer", seconds=spread)


@pytest.mark.parametrize(
    ("tokens", "limit", "before", "run"),
    [
        (100, None, [row("dense (b)", 1.0)], ["a", "b", "c"]),
        (100, 100, [row("dense (b)", 1.0)], ["a", "b", "c"]),
        (101, 100, [row("dense (a)", 2.0), row("dense (b)", 1.0)], ["b"]),
        (101, 100, [row("dense (a)", None), row("dense (c)", 3.0)], ["c"]),
        (101, 100, [row("dense", 0.1), row("dense (x)", 0.1)], ["a", "b", "c"]),
        (101, 100, [], ["a", "b", "c"]),
    ],
)
def test_beyond_a_length_only_the_fastest_peer_runs(
    tokens: int, limit: int | None, before: list[TtftRow], run: list[str]
) -> None:
    one = DensePeer(open_bench().session.executor, sdpa)
    assert list(Peers(dict.fromkeys("abc", one), {}).at(tokens, limit, before)) == run
