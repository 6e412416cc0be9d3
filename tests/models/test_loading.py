"""Opening models: what is accepted is right, all else is refused in one line that names it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.execution.eager import assert_near, rounding
from tests.models.configs import config_json
from tests.tiny import tiny_hf
from transformers import AutoConfig, GenerationConfig

from redknot.errors import InputError
from redknot.execution.session import Session
from redknot.models import load_model
from redknot.models.byte_tokenizer import byte_tokenizer
from redknot.models.fingerprint import fingerprint
from redknot.models.loading import LoadOptions, wrap_model
from redknot.recovery.policies import Dense

DUMMY = LoadOptions(load_format="dummy")
THETA = {"rope_theta": 10000.0}


def config_folder(folder: Path, **settings: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(config_json(**THETA) | settings))
    return folder


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A tiny model and its tokenizer, as `save_pretrained` leaves them."""
    folder = tmp_path / "tiny"
    tiny_hf().save_pretrained(folder)
    byte_tokenizer(add_bos=True).save_pretrained(folder)
    return folder


def test_a_type_without_adapter_is_refused_by_name_with_the_supported_ones(tmp_path: Path) -> None:
    config = AutoConfig.for_model("gpt2", n_layer=1, n_embd=16, n_head=2, vocab_size=300)
    config.save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"gpt2.*supported.*llama.*mistral.*qwen2.*qwen3"):
        load_model(tmp_path, DUMMY)


def test_a_type_that_nobody_knows_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nosuchtype"):
        load_model(config_folder(tmp_path, model_type="nosuchtype"), DUMMY)


@pytest.mark.parametrize("setting", ["attn_logit_softcapping", "final_logit_softcapping"])
def test_a_soft_cap_is_refused_and_not_ignored(tmp_path: Path, setting: str) -> None:
    with pytest.raises(InputError, match=setting):
        load_model(config_folder(tmp_path, **{setting: 5.0}), DUMMY)


def test_learned_attention_sinks_are_refused() -> None:
    hf = tiny_hf()
    hf.model.layers[0].self_attn.sinks = torch.nn.Parameter(torch.zeros(8))
    with pytest.raises(InputError, match="sinks"):
        wrap_model(hf, byte_tokenizer())


@pytest.mark.parametrize("name", ["./nothing", "/no/such/folder", "~/nothing", "/no/such.gguf"])
def test_a_missing_file_or_folder_is_named(name: str) -> None:
    with pytest.raises(InputError, match=f"{name}.*no such"):
        load_model(name)


BROKEN = {
    "no config": lambda folder: (folder / "config.json").unlink(),
    "config cut": lambda folder: (folder / "config.json").write_text('{"model_type": "lla'),
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "weights cut": lambda folder: cut(folder / "model.safetensors"),
    "no tokenizer": lambda folder: [path.unlink() for path in folder.glob("tokenizer*")],
    "tokenizer cut": lambda folder: cut(folder / "tokenizer.json"),
}


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_folder_is_refused_in_one_line(saved: Path, fault: str) -> None:
    BROKEN[fault](saved)
    with pytest.raises(InputError) as caught:
        load_model(saved)
    assert len(str(caught.value).splitlines()) == 1
    assert str(saved) in str(caught.value)


def test_a_weight_that_is_missing_is_not_made_up(saved: Path) -> None:
    """Transformers fills it with random numbers and only warns."""
    tensors = load_file(saved / "model.safetensors")
    del tensors["model.layers.2.self_attn.k_proj.weight"]
    save_file(tensors, saved / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match="k_proj"):
        load_model(saved)


def test_a_dummy_model_comes_from_its_config_alone(tmp_path: Path) -> None:
    model = load_model(config_folder(tmp_path), DUMMY)
    assert len(model.adapter.layers) == 1
    assert model.adapter.layers[0].shape.queries_per_group == 2
    assert model.adapter.dtype is torch.float32
    assert model.name == tmp_path.name
    session = Session(model)
    prompt = session.tokeniser.prompt(["alpha"], "beta")
    assert bool(torch.isfinite(session.prefill(prompt, Dense()).logits).all())


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32"])
def test_an_asked_for_element_type_is_used(tmp_path: Path, name: Any) -> None:
    model = load_model(config_folder(tmp_path), LoadOptions(load_format="dummy", dtype=name))
    assert str(model.adapter.dtype) == f"torch.{name}"


def test_a_saved_folder_opens_as_the_same_model(saved: Path) -> None:
    model, original = load_model(saved), tiny_hf()
    assert fingerprint(model.hf) == fingerprint(original)
    assert model.name == "tiny"
    here, there = (
        Session(wrapped) for wrapped in (wrap_model(original, byte_tokenizer(add_bos=True)), model)
    )
    assert here.namespace == there.namespace
    prompt = here.tokeniser.prompt(["alpha 🧪", "beta"], "gamma", "Be brief.")
    again = there.tokeniser.prompt(["alpha 🧪", "beta"], "gamma", "Be brief.")
    assert prompt.token_ids.tolist() == again.token_ids.tolist()
    assert prompt.spans == again.spans
    one, other = (session.prefill(prompt, Dense()).logits for session in (here, there))
    # Equal weights lie at other addresses, which may choose another matrix kernel.
    assert_near(other, one, rounding(original, len(prompt)))


def test_other_weights_have_another_fingerprint() -> None:
    assert fingerprint(tiny_hf(seed=1)) != fingerprint(tiny_hf())
    half = tiny_hf().bfloat16()
    assert fingerprint(half) != fingerprint(tiny_hf())
    assert fingerprint(half, rounded=True) == fingerprint(tiny_hf(), rounded=True)


def test_every_end_token_of_every_source_counts(saved: Path) -> None:
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps(config | {"eos_token_id": [257, 258, 259]}))
    GenerationConfig(eos_token_id=[10, 260]).save_pretrained(saved)
    model = load_model(saved)
    assert model.end_token_ids == {10, 257, 258, 259, 260, model.tokenizer.eos_token_id}


def test_a_single_end_token_counts(tmp_path: Path) -> None:
    model = load_model(config_folder(tmp_path, eos_token_id=7), DUMMY)
    assert model.end_token_ids == {7, model.tokenizer.eos_token_id}


IMPORT_ALL = """
import importlib, pkgutil, sys
for name in ("triton", "flash_attn", "flash_attn_interface", "vllm", "bitsandbytes"):
    sys.modules[name] = None
import torch, redknot
assert not torch.cuda.is_available()
for module in pkgutil.walk_packages(redknot.__path__, "redknot."):
    if not module.name.endswith(("__main__", "triton")):  # a backend is imported when chosen
        importlib.import_module(module.name)
print(torch.cuda.is_initialized())
"""


def test_every_module_imports_without_a_gpu_or_gpu_libraries() -> None:
    environment = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": ":".join(sys.path), "HOME": "/tmp"}
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "False"


def test_a_copy_of_a_folder_is_the_same_model_under_another_name(saved: Path) -> None:
    other = saved.with_name("moved")
    shutil.copytree(saved, other)
    one, two = load_model(saved), load_model(other)
    assert fingerprint(one.hf) == fingerprint(two.hf)
    assert (one.name, two.name) == ("tiny", "moved")
