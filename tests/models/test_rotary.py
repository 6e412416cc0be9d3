"""Rotary settings: the model's own kind and factors in every spelling, or a refusal."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.execution.eager import build_state
from tests.models.configs import EPS, gap, load_config
from tests.tiny import ROTARY, random_ids, tiny_hf, tiny_model, tiny_session
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from redknot.errors import InputError
from redknot.execution.cache import PromptCache
from redknot.kernels.relocate import rotate
from redknot.models import adapt
from redknot.models.rotary import Rotary

KINDS = [*ROTARY]


@pytest.mark.parametrize("kind", KINDS)
def test_tables_are_those_of_the_transformers_module(kind: str) -> None:
    hf = tiny_hf(rotary=kind)
    rotary = Rotary.of(hf.model.rotary_emb, hf.config)
    positions = torch.tensor([0, 1, 10, 255, 256, 257, 4000, 6000, 8191])
    cosine, sine = hf.model.rotary_emb(torch.zeros(1), positions[None])
    half = cosine.shape[-1] // 2
    table = rotary.table(positions)
    assert torch.equal(table[0], cosine[0, :, :half])
    assert torch.equal(table[1], sine[0, :, :half])
    assert rotary.kind == kind


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_a_relocated_first_layer_key_is_a_freshly_rotated_one(kind: str) -> None:
    """From below original_max (256) to positions across and behind it, and hits are counted."""
    session = tiny_session(rotary=kind, add_bos=True)
    adapter, ids = session.model.adapter, random_ids(80)
    state = build_state(adapter, ids, (256,))
    layer = adapter.layers[0]
    fresh = layer.keys(layer.attention_input(adapter.embed(ids)))
    for start in (1, 200, 1000):
        cache = PromptCache.allocate(adapter, start + 80)
        cache.place(adapter, state, start, 80)
        truth = rotate(fresh, *adapter.rotary.table(torch.arange(start, start + 80)))
        # Both are one rotation of one projection over the hidden size of 128.
        torch.testing.assert_close(
            cache.first(start + 80)[0][0, :, start:], truth, rtol=0, atol=128 * EPS
        )
    documents = ["alpha " * 20, "bravo " * 20]
    session.build_missing(session.tokeniser.prompt(documents, "Why?"))
    assert len(session.look_up(session.tokeniser.prompt(documents[::-1], "Why?")).hits) == 2


@pytest.mark.parametrize("kind", ["llama3", "yarn"])
@pytest.mark.parametrize("pairs", [(0,), (3,), (5, 6, 7)], ids=["high", "middle", "low"])
def test_each_band_of_scaled_frequencies_has_its_own_angles(
    kind: str, pairs: tuple[int, ...]
) -> None:
    """High frequencies stay, low ones are divided by the factor, the middle lies between."""
    rotary, factor = tiny_model(rotary=kind).adapter.rotary, ROTARY[kind]["factor"]
    for pair in pairs:
        plain = 10000.0 ** (-2 * pair / 16)
        ratio = float(rotary.inv_freq[pair]) / plain
        wanted = {0: 1.0, 3: None}.get(pair, 1 / factor)
        if wanted is None:
            assert 1 / factor + 0.01 < ratio < 1 - 0.01
        else:
            assert math.isclose(ratio, wanted, rel_tol=8 * EPS)


SCALINGS = {
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    "yarn": {"factor": 8.0, "original_max_position_embeddings": 1024},
}


@pytest.mark.parametrize("spelling", ["rope_type", "type"])
@pytest.mark.parametrize("shape", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("kind", SCALINGS)
def test_every_spelling_of_a_scaling_gives_its_frequencies_far_out(
    tmp_path: Path, kind: str, shape: str, spelling: str
) -> None:
    """Configs of 4.x (theta beside rope_scaling) and 5.x (one dict), judged at position 6000."""
    scaling = {spelling: kind, **SCALINGS[kind]}
    if shape == "rope_parameters":
        settings = {shape: {"rope_theta": 50000.0, **scaling}}
    else:
        settings = {shape: scaling, "rope_theta": 50000.0}
    model = load_config(tmp_path, **settings)
    rotary = model.adapter.rotary
    inv_freq, magnitude = ROPE_INIT_FUNCTIONS[kind](model.hf.config)
    assert (rotary.kind, rotary.magnitude) == (kind, magnitude)
    at = torch.tensor([6000])
    assert float(gap(rotary, at, inv_freq).max()) <= 6000 * EPS
    plain = 50000.0 ** -(torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    assert float(gap(rotary, at, plain).max()) > 0.1  # an ignored scaling would show


def test_configs_of_both_generations_have_the_same_frequencies(tmp_path: Path) -> None:
    old = load_config(tmp_path, rope_theta=500000.0).adapter.rotary
    parameters = {"rope_theta": 500000.0, "rope_type": "default"}
    new = load_config(tmp_path, rope_parameters=parameters).adapter.rotary
    assert torch.equal(old.inv_freq, new.inv_freq)
    assert old.identity() == new.identity()
    assert math.isclose(float(new.inv_freq[1]), 500000.0 ** (-2 / 16), rel_tol=4 * EPS)


def test_a_config_object_without_theta_is_refused() -> None:
    hf = tiny_hf()
    del hf.config.rope_parameters["rope_theta"]
    with pytest.raises(InputError, match="rope_theta"):
        adapt(hf)


@pytest.mark.parametrize("rotary", [{}, {"rope_parameters": {"rope_type": "default"}}], ids=str)
def test_a_config_file_without_theta_is_refused(tmp_path: Path, rotary: dict[str, Any]) -> None:
    """A default may be a hundred times off."""
    with pytest.raises(InputError, match="rope_theta"):
        load_config(tmp_path, **rotary)


def test_an_explicit_attention_factor_is_honoured(tmp_path: Path) -> None:
    parameters = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 64.0}
    limits = {"original_max_position_embeddings": 128}
    formula = load_config(tmp_path, rope_parameters={**parameters, **limits}).adapter.rotary
    assert math.isclose(formula.magnitude, 0.1 * math.log(64) + 1, rel_tol=EPS)
    explicit = {**parameters, **limits, "attention_factor": 1.0}
    rotary = load_config(tmp_path, rope_parameters=explicit).adapter.rotary
    assert rotary.magnitude == 1.0
    cosine, sine = rotary.table(torch.arange(5000))
    assert float((cosine.square() + sine.square() - 1).abs().max()) <= 4 * EPS


@pytest.mark.parametrize("kind", KINDS)
def test_relocation_puts_the_magnitude_on_a_key_once(kind: str) -> None:
    adapter, ids = tiny_model(rotary=kind).adapter, random_ids(40)
    state = build_state(adapter, ids, (256,))
    norms = state.planes["key"].norm(dim=-1)
    for start in (0, 300, 6000):
        cache = PromptCache.allocate(adapter, start + 40)
        cache.place(adapter, state, start, 40)
        turned = cache.first(start + 40)[0][:, :, start:].norm(dim=-1)
        torch.testing.assert_close(turned, norms * adapter.rotary.magnitude, rtol=16 * EPS, atol=0)


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "dynamic", "factor": 2.0},
        {
            "rope_type": "longrope",
            "factor": 2.0,
            "short_factor": [1.0] * 8,
            "long_factor": [2.0] * 8,
            "original_max_position_embeddings": 32,
        },
    ],
    ids=lambda parameters: parameters["rope_type"],
)
def test_kinds_that_depend_on_length_are_refused_at_load(
    tmp_path: Path, parameters: dict[str, Any]
) -> None:
    with pytest.raises(InputError, match=parameters["rope_type"]):
        load_config(tmp_path, rope_parameters={"rope_theta": 10000.0, **parameters})
