"""Models of random weights, drawn once, on the device and in the wanted type."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from redknot.models.families import adapt

SEED = 0


def dummy_model(config: PretrainedConfig, dtype: torch.dtype, device: str) -> Any:
    """The model of ``config``: norms are ones, biases zeros, all else normal; always the same.

    Transformers would draw every weight twice. Here the meta device takes its draws.
    """
    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(config, dtype=dtype)
    adapt(hf)  # refuses before memory is taken
    hf.to_empty(device=device)
    hf.tie_weights()  # emptying gives each tied name a tensor of its own
    _draw(hf, getattr(config, "initializer_range", 0.02), device)
    # Angles are buffers that no weight holds; `Rotary.of` makes them on the CPU too.
    hf.model.rotary_emb = type(hf.model.rotary_emb)(hf.config).to(device)
    return hf


@torch.no_grad()
def _draw(hf: Any, deviation: float, device: str) -> None:
    generator = torch.Generator(device).manual_seed(SEED)
    for name, parameter in hf.named_parameters():
        if name.endswith(".bias"):
            parameter.zero_()
        elif parameter.dim() == 1:  # a norm
            parameter.fill_(1)
        else:
            parameter.normal_(0, deviation, generator=generator)
