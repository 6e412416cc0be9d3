"""Config files for the tests of loading, and the distance of rotary tables from float64."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from redknot.models import LoadedModel, load_model
from redknot.models.loading import LoadOptions
from redknot.models.rotary import Rotary

EPS = torch.finfo(torch.float32).eps


def config_json(**rotary: Any) -> dict[str, Any]:
    """A Llama config as a file holds it."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": 300,
        "max_position_embeddings": 8192,
        **rotary,
    }


def load_config(folder: Path, **rotary: Any) -> LoadedModel:
    (folder / "config.json").write_text(json.dumps(config_json(**rotary)))
    return load_model(folder, LoadOptions(load_format="dummy"))


def gap(rotary: Rotary, positions: Tensor, inv_freq: Tensor) -> Tensor:
    """Radians between the table and float64 angles, and the table's magnitude taken out."""
    cosine, sine = (part.double() / rotary.magnitude for part in rotary.table(positions))
    truth = positions[:, None].double() * inv_freq.double()
    return torch.atan2(
        sine * truth.cos() - cosine * truth.sin(), cosine * truth.cos() + sine * truth.sin()
    ).abs()
