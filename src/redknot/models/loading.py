"""Finding and opening a model: embedded, folder, GGUF file, hub name, or a shape that ships."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import disable_progress_bar

from redknot.errors import InputError
from redknot.models.adapter import Adapter
from redknot.models.byte_tokenizer import byte_tokenizer
from redknot.models.delta import Delta
from redknot.models.dummy import dummy_model
from redknot.models.embedded import ALIASES, NAME, embedded_gguf
from redknot.models.families import adapt, supported_types
from redknot.models.shapes import keep_first_layers, shape_folder

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model ready for the executor, with what belongs to it."""

    name: str
    adapter: Adapter
    tokenizer: PreTrainedTokenizerBase
    end_token_ids: frozenset[int]
    hf: PreTrainedModel
    "The Transformers model itself: the dense peer, and the owner of the weights."


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadOptions:
    """How to open a model."""

    load_format: Literal["auto", "dummy"] = "auto"
    "dummy builds the config with random weights."
    layers: int | None = None
    "Only the first layers, with dummy weights."
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    "auto is float32 on a CPU and the model's own type on a GPU."
    device: str = "cpu"
    "cpu, cuda or cuda:N."
    delta: Path | None = None
    "Folder of differences to add to the weights."


def load_model(model: str | Path, options: LoadOptions = LoadOptions()) -> LoadedModel:
    """Open ``model``; `InputError` where it is missing, broken or of no supported family."""
    if options.layers is not None and options.load_format != "dummy":
        raise InputError("--layers needs --load-format dummy")
    shape = None if Path(model).exists() else shape_folder(str(model))
    if shape is not None and options.load_format != "dummy":
        raise InputError(
            f"only the shape of {shape.name} ships: open it with --load-format dummy,"
            " or name a folder or hub model that has weights"
        )
    source = _source(shape or model)
    name = NAME if str(model) in ALIASES else Path(shape or model).name
    delta = None if options.delta is None else Delta.read(options.delta)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    disable_progress_bar()  # over the weights; a refusal stays one line
    try:
        config = AutoConfig.from_pretrained(**source)
        _check_theta(source, config)
        if delta is not None:
            delta.configure(config)
        if options.layers is not None:
            name += keep_first_layers(config, options.layers)
        hf = _build(source, config, options)
        tokenizer = _tokenizer(source, options)
    except InputError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise InputError(f"cannot open model {model}: {str(error).splitlines()[0]}") from error
    if delta is not None:
        delta.apply(hf)
    if options.delta is not None:
        name += f"+{options.delta.resolve().name}"
    return wrap_model(hf.to(options.device), tokenizer, name)


def load_tokenizer(
    model: str | Path, options: LoadOptions = LoadOptions()
) -> PreTrainedTokenizerBase:
    """The tokenizer of ``model`` alone, without its weights; `InputError` as `load_model`."""
    shape = None if Path(model).exists() else shape_folder(str(model))
    try:
        return _tokenizer(_source(shape or model), options)
    except InputError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise InputError(f"cannot open model {model}: {str(error).splitlines()[0]}") from error


def wrap_model(
    hf: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str = "model"
) -> LoadedModel:
    """A model that the caller has opened with Transformers."""
    hf.eval().requires_grad_(False)
    return LoadedModel(name, adapt(hf), tokenizer, _end_tokens(hf, tokenizer), hf)


def _source(model: str | Path) -> dict[str, Any]:
    """Arguments that name the model to Transformers."""
    if str(model) in ALIASES:
        model = embedded_gguf()
    path = Path(model)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise InputError(f"{path}: no such file")
        return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    if path.exists():
        return {"pretrained_model_name_or_path": str(path)}
    if str(model).startswith(("/", ".", "~")):
        raise InputError(f"{model}: no such file or folder")
    return {"pretrained_model_name_or_path": str(model)}


def _check_theta(source: dict[str, Any], config: PretrainedConfig) -> None:
    """A config file must state its rotary base: a default may be 100 times off."""
    if "gguf_file" in source or config.model_type not in supported_types():
        return
    raw, _ = PretrainedConfig.get_config_dict(source["pretrained_model_name_or_path"])
    places = (raw, raw.get("rope_parameters") or {}, raw.get("rope_scaling") or {})
    if not any("rope_theta" in place for place in places):
        raise InputError(
            "the model's config has no rope_theta; state it (Llama 1 and 2 were trained with 10000)"
        )


def _build(source: dict[str, Any], config: PretrainedConfig, options: LoadOptions) -> Any:
    dtype = _dtype(config, options)
    if options.load_format == "dummy":
        return dummy_model(config, dtype, options.device)
    hf, info = AutoModelForCausalLM.from_pretrained(
        **source, config=config, dtype=dtype, output_loading_info=True
    )
    if info["missing_keys"]:
        raise InputError(f"the checkpoint lacks {', '.join(sorted(info['missing_keys'])[:3])}")
    return hf


def _dtype(config: PretrainedConfig, options: LoadOptions) -> torch.dtype:
    if options.dtype != "auto":
        return DTYPES[options.dtype]
    return torch.float32 if options.device == "cpu" else config.dtype or torch.bfloat16


def _tokenizer(source: dict[str, Any], options: LoadOptions) -> PreTrainedTokenizerBase:
    folder = Path(source["pretrained_model_name_or_path"])
    missing = not any(
        (folder / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")
    )
    if options.load_format == "dummy" and "gguf_file" not in source and missing:
        return byte_tokenizer()
    tokenizer = AutoTokenizer.from_pretrained(**source)
    if not tokenizer.is_fast:
        raise InputError("the model's tokenizer gives no offsets (a fast tokenizer is needed)")
    return tokenizer


def _end_tokens(hf: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Every end token of the generation config, the config and the tokenizer."""
    found: set[int] = set()
    for value in (
        getattr(hf.generation_config, "eos_token_id", None),
        getattr(hf.config, "eos_token_id", None),
        tokenizer.eos_token_id,
    ):
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    return frozenset(found)
