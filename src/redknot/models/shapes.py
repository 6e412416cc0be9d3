"""Shapes of benchmark models that ship without weights, and models cut to their first layers."""

from pathlib import Path

from transformers import PretrainedConfig

from redknot.errors import InputError

CONFIGS = Path(__file__).parent / "configs"


def shape_folder(name: str) -> Path | None:
    """The shipped folder called ``name`` in any case, if there is one."""
    found = {folder.name: folder for folder in CONFIGS.iterdir() if folder.is_dir()}
    return found.get(name.lower())


def keep_first_layers(config: PretrainedConfig, layers: int) -> str:
    """Cut ``config`` to its first ``layers`` layers; returns what the model's name says of that."""
    present = config.num_hidden_layers
    if not 1 <= layers <= present:
        raise InputError(f"--layers {layers} is outside 1 to {present}, the layers of this model")
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = config.layer_types[:layers]
    return "" if layers == present else f"[{layers} of {present} layers]"
