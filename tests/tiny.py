"""Tiny random models of every family, with peaked attention so that mistakes show."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from redknot.execution.session import Session
from redknot.models.byte_tokenizer import byte_tokenizer
from redknot.models.loading import LoadedModel, wrap_model

ROTARY: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 256,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 256,
    },
}


def tiny_hf(
    family: str = "llama",
    *,
    layers: int = 4,
    heads: tuple[int, int] = (8, 2),
    rotary: str = "default",
    sharpen: float = 4.0,
    seed: int = 0,
    **settings: Any,
) -> PreTrainedModel:
    """A random model; q and k weights are scaled by ``sharpen``."""
    query_heads, kv_heads = heads
    config = AutoConfig.for_model(
        family,
        hidden_size=16 * query_heads,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=query_heads,
        num_key_value_heads=kv_heads,
        head_dim=16,
        vocab_size=300,
        max_position_embeddings=8192,
        rope_parameters=dict(ROTARY[rotary]),
        bos_token_id=256,
        eos_token_id=257,
        pad_token_id=None,
        **settings,
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for layer in model.model.layers:
            for name in ("q_proj", "k_proj"):
                getattr(layer.self_attn, name).weight.mul_(sharpen)
    return model.eval()


def tiny_model(family: str = "llama", *, add_bos: bool = False, **options: Any) -> LoadedModel:
    """The same, ready for the executor, with a byte-level tokenizer."""
    return wrap_model(tiny_hf(family, **options), byte_tokenizer(add_bos=add_bos), "tiny")


def tiny_session(**options: Any) -> Session:
    """A session over a tiny model."""
    return Session(tiny_model(**options))


def random_ids(count: int, seed: int = 0) -> torch.Tensor:
    """Byte tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count,), generator=generator)
