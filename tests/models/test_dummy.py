"""Dummy weights: drawn once and in place, always the same, in a model that Transformers can run."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.configs import config_json
from tests.tiny import ROTARY
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from redknot.errors import InputError
from redknot.models import LoadedModel, load_model
from redknot.models.dummy import dummy_model
from redknot.models.loading import LoadOptions

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def opened(folder: Path, dtype: Any = "auto", **settings: Any) -> LoadedModel:
    rotary = {"rope_parameters": ROTARY["yarn"]}
    settings = config_json(**rotary) | {"num_hidden_layers": 2, "architectures": None} | settings
    (folder / "config.json").write_text(json.dumps(settings))
    return load_model(folder, LoadOptions(load_format="dummy", dtype=dtype))


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_normal_norms_are_ones_and_biases_zeros(tmp_path: Path, family: str) -> None:
    hf = opened(tmp_path, model_type=family, initializer_range=0.05).hf
    counts = {"norm": 0, "bias": 0}
    for name, parameter in hf.named_parameters():
        if "norm" in name:
            counts["norm"] += 1
            assert bool((parameter == 1).all()), name
        elif name.endswith("bias"):
            counts["bias"] += 1
            assert bool((parameter == 0).all()), name
        else:
            assert bool(torch.isfinite(parameter).all()), name
            assert float(parameter.std()) == pytest.approx(0.05, rel=0.2), name
            assert abs(float(parameter.mean())) < 0.01, name
    assert counts == {
        "norm": 9 if family == "qwen3" else 5,
        "bias": 6 if family == "qwen2" else 0,
    }
    first, second = (layer.self_attn.o_proj.weight for layer in hf.model.layers)
    assert not torch.equal(first, second)


def test_two_loads_have_the_same_weights_whatever_was_drawn_before(tmp_path: Path) -> None:
    torch.manual_seed(1)
    one = opened(tmp_path).hf.state_dict()
    torch.manual_seed(2)
    before = torch.get_rng_state()
    two = opened(tmp_path).hf.state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("rotary", ROTARY)
@pytest.mark.parametrize("family", FAMILIES)
def test_buffers_are_those_of_transformers_own_model(
    tmp_path: Path, family: str, rotary: str
) -> None:
    model = opened(tmp_path, "bfloat16", model_type=family, rope_parameters=ROTARY[rotary])
    config = AutoConfig.from_pretrained(tmp_path)
    own = dict(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).named_buffers())
    here = dict(model.hf.named_buffers())
    assert here.keys() == own.keys()
    for name, buffer in own.items():
        assert here[name].dtype == buffer.dtype
        assert torch.equal(here[name], buffer), name
    assert torch.equal(model.adapter.rotary.inv_freq, here["model.rotary_emb.inv_freq"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_runs_a_dummy_model(tmp_path: Path, family: str, dtype: str) -> None:
    hf = opened(tmp_path, dtype, model_type=family).hf
    assert {p.device.type for p in (*hf.parameters(), *hf.buffers())} == {"cpu"}
    logits = hf(torch.arange(40)[None]).logits
    assert bool(torch.isfinite(logits).all())
    assert float(logits.std()) > 0


def test_tied_embeddings_stay_one_tensor(tmp_path: Path) -> None:
    hf = opened(tmp_path, tie_word_embeddings=True).hf
    assert hf.lm_head.weight is hf.model.embed_tokens.weight
    apart = opened(tmp_path, tie_word_embeddings=False).hf
    assert not torch.equal(apart.lm_head.weight, apart.model.embed_tokens.weight)


class Made(TorchDispatchMode):
    """What is made outside the meta device: draws, and the types and sizes of new tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.draws: list[int] = []
        self.sizes: list[tuple[torch.dtype, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.device.type != "meta":
            if func._schema.name in ("aten::normal_", "aten::uniform_"):
                self.draws.append(out.numel())
            elif not func.is_view and not func._schema.is_mutable:
                self.sizes.append((out.dtype, out.numel()))
        return out


def test_every_weight_is_made_and_drawn_once_in_the_wanted_type() -> None:
    config = AutoConfig.for_model(**config_json(rope_theta=1e4) | {"num_hidden_layers": 2})
    with Made() as made:
        hf = dummy_model(config, torch.bfloat16, "cpu")
    weights = sorted(p.numel() for p in hf.parameters() if p.dim() > 1)
    assert sorted(made.draws) == weights
    large = [(dtype, size) for dtype, size in made.sizes if size >= weights[0]]
    assert sorted(size for _, size in large) == weights
    assert {dtype for dtype, _ in large} == {torch.bfloat16}


def test_what_has_no_adapter_is_refused_before_memory_is_taken() -> None:
    config = AutoConfig.for_model("gpt2", n_layer=1, n_embd=16, n_head=2, vocab_size=300)
    with Made() as made, pytest.raises(InputError, match="gpt2"):
        dummy_model(config, torch.float32, "cpu")
    assert not made.draws
