"""Compiled parts give what the functions give, compiled once for all layers and row counts."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import pytest
import torch
from tests.execution.eager import lively_session, spanned
from tests.execution.test_masks import random_map
from tests.tiny import random_ids
from torch import Tensor

from redknot.execution.batch import DecodeBatch
from redknot.execution.parts import EAGER, Parts
from redknot.execution.session import Session
from redknot.models import Layer
from redknot.recovery.policies import POLICIES

MODELS = ["llama", "qwen2-14/2", "qwen3"]
NAMES = [field.name for field in fields(Parts)]
VERSIONS = 3
"Of a function: for a single row, for more, and for blocks of rows that do not begin a tensor."


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """What other tests have compiled counts for nothing."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Watched:
    """Parts that count, by function, calls, graphs that were compiled and graphs that ran."""

    def __init__(self) -> None:
        self.calls, self.graphs, self.runs = Counter[str](), Counter[str](), Counter[str]()
        self._running = ""
        compiled = Parts.compiled(backend=self._compile)  # type: ignore[arg-type]
        self.parts = Parts(*(self._watch(name, getattr(compiled, name)) for name in NAMES))

    def assert_compiled_once(self) -> None:
        """Few graphs, and every call ran one of them: nothing broke and nothing fell back."""
        assert self.calls
        assert max(self.graphs.values()) <= VERSIONS, self.graphs
        assert self.runs == self.calls

    def _watch(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*arguments: Any) -> Any:
            self._running = name
            self.calls[name] += 1
            return function(*arguments)

        return watched

    def _compile(self, graph: torch.fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
        self.graphs[self._running] += 1

        def run(*arguments: Any) -> Any:
            self.runs[self._running] += 1
            return graph.forward(*arguments)

        return run


def inputs(session: Session, name: str, layer: Layer, rows: int) -> tuple[Any, ...]:
    """What the executor gives to a part: the last rows alone ask in `project_tail`."""
    config = session.model.hf.config
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, config.hidden_size, generator=generator)
    width = config.num_attention_heads * config.head_dim
    attended = torch.randn(rows, width, generator=generator)
    cosine, sine = session.model.adapter.rotary.table(torch.arange(rows) + 3)
    return {
        "project": (layer, hidden, cosine, sine),
        "project_tail": (layer, hidden, cosine[-1:], sine[-1:]),
        "add_attention": (layer, hidden, attended),
        "add_both": (layer, hidden, attended),
        "ffn": (layer, hidden),
    }[name]


def tensors(found: Any) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else list(found)


@torch.inference_mode()
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("model", MODELS)
def test_compiled_parts_give_the_same_bits(model: str, backend: str) -> None:
    session, compiled = lively_session(model), Parts.compiled(backend=backend)
    for name in NAMES:
        for rows in (5, 1, 2, 70):
            for layer in session.model.adapter.layers:
                given = inputs(session, name, layer, rows)
                kept = [x.clone() for x in given[1:]]
                truth = getattr(EAGER, name)(*given)
                for got, wanted in zip(
                    tensors(getattr(compiled, name)(*given)), tensors(truth), strict=True
                ):
                    assert got.shape == wanted.shape
                    assert torch.equal(got, wanted)
                assert all(map(torch.equal, kept, given[1:]))  # a part changes nothing in place


@torch.inference_mode()
@pytest.mark.parametrize("first", [1, 2, 7, 8, 14, 16, 96, 128, 224])
@pytest.mark.parametrize("model", MODELS)
def test_layers_and_row_counts_share_one_compilation(model: str, first: int) -> None:
    """Whatever comes ``first``: as many rows as a head, a layer or the FFN is wide, too."""
    session, watched = lively_session(model), Watched()
    for name in NAMES:
        for rows in (first, 7, 1, 65, 1, 2, 300):
            for layer in session.model.adapter.layers:
                getattr(watched.parts, name)(*inputs(session, name, layer, rows))
    assert set(watched.calls) == set(NAMES)
    watched.assert_compiled_once()


@torch.inference_mode()
def test_any_number_of_models_in_one_process_stays_compiled() -> None:
    """PyTorch keeps 8 versions of a function and runs further ones as they are."""
    watched = []
    for model in ("llama", "llama-9/3", "qwen2-14/2", "qwen3", "mistral", "llama"):
        session = lively_session(model)
        watched.append(Watched())
        for rows in (7, 1, 30):
            for layer in session.model.adapter.layers:
                watched[-1].parts.ffn(*inputs(session, "ffn", layer, rows))
    assert [w.runs for w in watched] == [w.calls for w in watched]
    assert max(max(w.graphs.values()) for w in watched) <= VERSIONS


@pytest.mark.parametrize("row_block", [16384, 16])
@pytest.mark.parametrize("model", MODELS)
def test_requests_of_all_policies_and_lengths_share_one_compilation(
    model: str, row_block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Building, probing, recovering, extending and decoding, with what the executor really gives:
    views, tails, gathered rows, and blocks of long prompts."""
    monkeypatch.setattr("redknot.execution.layer.ROW_BLOCK", row_block)
    session, watched = lively_session(model), Watched()
    session.executor.parts = watched.parts
    head_map = random_map(session.model.hf, 1)
    batch = DecodeBatch(session.executor, 3, 400)
    for seed, (name, policy) in enumerate(POLICIES.items()):
        prompt = spanned(40 + 9 * seed, 31, question=12 + seed, seed=seed)
        session.build_missing(prompt)
        options = {"dense_until": 1, "recent": 4} if name == "redknot" else {}
        prefilled = session.prefill(prompt, policy(windows="all", **options), head_map)
        session.executor.extend(prefilled, random_ids(1 + seed, seed=seed))
        if len(batch.requests) == 3:
            batch.remove(0)
        batch.add(prefilled)
        for token in range(3):
            batch.step([token] * len(batch.requests))
    assert set(watched.calls) == set(NAMES)
    watched.assert_compiled_once()
