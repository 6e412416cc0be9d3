"""The shapes that ship: their sizes, how they are found, and models cut to their first layers."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.configs import config_json
from transformers import AutoConfig, AutoModelForCausalLM

from redknot.errors import InputError
from redknot.models import adapt, load_model, shapes
from redknot.models.loading import LoadOptions, _check_theta, _dtype
from redknot.models.rotary import Rotary

DUMMY = LoadOptions(load_format="dummy")
# parameters, layers, hidden, ffn, query heads, vocabulary, context; rotary kind, base, stretch
FACTS = {
    "qwen3-32b": (32.8e9, 64, 5120, 25600, 64, 151936, 131072, "yarn", 1e6, 4.0),
    "mistral-7b-v0.3": (7.25e9, 32, 4096, 14336, 32, 32768, 32768, "default", 1e6, 1.0),
    "llama-3.3-70b": (70.6e9, 80, 8192, 28672, 64, 128256, 131072, "llama3", 5e5, 8.0),
}


def shipped_config(name: str) -> Any:
    folder = shapes.shape_folder(name)
    assert folder is not None
    return AutoConfig.from_pretrained(folder)


def test_these_shapes_ship() -> None:
    assert {folder.name for folder in shapes.CONFIGS.iterdir()} == set(FACTS)


@pytest.mark.parametrize("name", FACTS)
def test_a_shipped_shape_has_the_sizes_of_its_model(name: str) -> None:
    parameters, layers, hidden, ffn, query_heads, vocabulary, context, *_ = FACTS[name]
    config = shipped_config(name)
    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    assert sum(p.numel() for p in hf.parameters()) == pytest.approx(parameters, rel=0.01)
    assert hf.model.embed_tokens.weight.shape == (vocabulary, hidden)
    assert hf.lm_head.weight is not hf.model.embed_tokens.weight
    adapter = adapt(hf)
    assert (len(adapter.layers), adapter.context_length) == (layers, context)
    for layer in adapter.layers:
        shape = layer.shape
        assert (shape.num_groups, shape.head_dim, shape.horizon) == (8, 128, None)
        assert shape.queries_per_group * 8 == query_heads
        assert shape.cost.ffn == 6 * hidden * ffn
        assert shape.cost.output == 2 * query_heads * 128 * hidden
    assert not any(n.endswith("bias") for n, _ in hf.named_parameters())


@pytest.mark.parametrize("name", FACTS)
def test_a_shipped_shape_turns_by_its_models_angles(name: str) -> None:
    """The fastest pair turns as trained and the slowest is slowed by the whole factor."""
    *_, kind, base, stretch = FACTS[name]
    config = shipped_config(name)
    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(config)
    rotary = Rotary.of(type(hf.model.rotary_emb)(config), config)
    assert rotary.kind == kind
    assert rotary.inv_freq[0] == 1
    assert float(rotary.inv_freq[-1]) == pytest.approx(base ** (-126 / 128) / stretch, rel=1e-5)
    assert rotary.magnitude == pytest.approx(0.1 * math.log(4) + 1 if kind == "yarn" else 1)
    trained = {"qwen3-32b": 32768, "llama-3.3-70b": 8192}.get(name)
    assert config.rope_parameters.get("original_max_position_embeddings") == trained


@pytest.mark.parametrize("name", FACTS)
def test_a_shipped_shape_states_its_rotary_base_norm_and_element_type(name: str) -> None:
    config = shipped_config(name)
    _check_theta({"pretrained_model_name_or_path": str(shapes.shape_folder(name))}, config)
    assert config.rms_norm_eps == (1e-6 if name == "qwen3-32b" else 1e-5)
    assert config.hidden_act == "silu"
    on_gpu = LoadOptions(load_format="dummy", device="cuda:0")
    assert _dtype(config, on_gpu) is torch.bfloat16
    assert _dtype(config, DUMMY) is torch.float32


@pytest.fixture
def tiny_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A small shape in place of the shipped ones."""
    folder = tmp_path / "tiny-shape"
    folder.mkdir()
    layered = config_json(rope_theta=1e4) | {"num_hidden_layers": 3}
    (folder / "config.json").write_text(json.dumps(layered))
    monkeypatch.setattr(shapes, "CONFIGS", tmp_path)
    return folder.name


@pytest.mark.parametrize("spelling", ["tiny-shape", "Tiny-Shape", "TINY-SHAPE"])
def test_a_shape_opens_by_name_in_any_case(tiny_shape: str, spelling: str) -> None:
    model = load_model(spelling, DUMMY)
    assert model.name == tiny_shape
    assert len(model.adapter.layers) == 3


@pytest.mark.parametrize("name", ["qwen3-32b", "Mistral-7B-v0.3", "LLAMA-3.3-70B"])
def test_a_shape_without_dummy_weights_is_refused_in_one_line(name: str) -> None:
    with pytest.raises(InputError) as caught:
        load_model(name)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    for part in (name.lower(), "only the shape", "--load-format dummy", "folder", "hub"):
        assert part in message


def test_a_folder_of_a_shapes_name_is_opened_and_not_the_shape(
    tiny_shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "here" / tiny_shape
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config_json(rope_theta=1e4)))
    monkeypatch.chdir(folder.parent)
    for name in (tiny_shape, folder):
        assert len(load_model(name, DUMMY).adapter.layers) == 1
    with pytest.raises(InputError, match="cannot open model"):
        load_model(tiny_shape)


def test_only_the_first_layers_are_kept_and_are_the_whole_models(tiny_shape: str) -> None:
    whole = load_model(tiny_shape, DUMMY)
    part = load_model(tiny_shape, LoadOptions(load_format="dummy", layers=2))
    assert part.name == "tiny-shape[2 of 3 layers]"
    assert len(part.adapter.layers) == part.hf.config.num_hidden_layers == 2
    weights = whole.hf.state_dict()
    for name, weight in part.hf.model.state_dict().items():
        assert torch.equal(weight, weights[f"model.{name}"]), name
    logits = part.hf(torch.arange(9)[None], use_cache=True).logits
    assert bool(torch.isfinite(logits).all())


def test_all_layers_are_no_cut(tiny_shape: str) -> None:
    assert load_model(tiny_shape, LoadOptions(load_format="dummy", layers=3)).name == tiny_shape


def test_a_cut_keeps_each_layers_own_kind(tmp_path: Path) -> None:
    kinds = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
    settings = {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "num_hidden_layers": 4,
        "layer_types": kinds,
        "use_sliding_window": True,
        "sliding_window": 16,
    }
    (tmp_path / "config.json").write_text(json.dumps(config_json(rope_theta=1e4) | settings))
    model = load_model(tmp_path, LoadOptions(load_format="dummy", layers=3))
    assert model.hf.config.layer_types == kinds[:3]
    assert [layer.shape.horizon for layer in model.adapter.layers] == [None, 16, None]
    assert bool(torch.isfinite(model.hf(torch.arange(40)[None]).logits).all())


@pytest.mark.parametrize("layers", [-1, 0, 4])
def test_layers_that_the_model_lacks_are_refused(tiny_shape: str, layers: int) -> None:
    with pytest.raises(InputError, match=f"--layers {layers} .*1 to 3"):
        load_model(tiny_shape, LoadOptions(load_format="dummy", layers=layers))


@pytest.mark.parametrize("name", ["embedded", "qwen3-32b", "/no/such/folder"])
def test_a_cut_needs_dummy_weights(name: str) -> None:
    with pytest.raises(InputError, match="--layers needs --load-format dummy"):
        load_model(name, LoadOptions(layers=1))
