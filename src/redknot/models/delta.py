"""Weights as a base model plus a folder of differences, checked by checksums.

Tensors of a delta folder: ``<weight>norm.weight`` replaces; ``<module>.delta`` is added;
``<module>.lora_A`` and ``.lora_B`` add ``lora_scale * B @ A``. Integer factors come as ``.i4`` (two
values a byte, low nibble first) or ``.i8`` with a ``.scale`` for each run along the input. Settings
(``rope_theta``, ``lora_scale``) stand in the metadata of the files.
"""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from redknot.errors import InputError


@dataclass(frozen=True, slots=True, eq=False)
class Delta:
    """Verified differences of one folder, still quantised, and their settings."""

    tensors: dict[str, Tensor]
    settings: dict[str, str]

    @classmethod
    def read(cls, folder: Path) -> "Delta":
        """All tensors of ``folder``, after every file's SHA-256 has been found right."""
        tensors: dict[str, Tensor] = {}
        settings: dict[str, str] = {}
        for path in _verified(folder):
            with safe_open(path, "pt") as file:
                settings |= file.metadata() or {}
                tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return cls(tensors, settings)

    def configure(self, config: PretrainedConfig) -> None:
        """Write the settings that shape the forward pass into ``config``."""
        if "rope_theta" in self.settings:
            config.rope_parameters["rope_theta"] = float(self.settings["rope_theta"])

    def apply(self, model: PreTrainedModel) -> None:
        """Add the differences in place, each sum rounded to bfloat16 as in training."""
        weights = model.state_dict()
        with torch.no_grad():
            for name, stored in self.tensors.items():
                module, _, kind = name.rpartition(".")
                if name.endswith("norm.weight"):
                    _target(weights, name).copy_(stored)
                elif module.endswith(".delta") and kind != "scale":
                    _add(weights, module.removesuffix(".delta"), self._dense(module, kind))
                elif module.endswith(".lora_A") and kind != "scale":
                    target = module.removesuffix(".lora_A")
                    high = self._dense(target + ".lora_B", kind)
                    scale = float(self.settings.get("lora_scale", 1))
                    _add(weights, target, scale * high @ self._dense(module, kind))

    def _dense(self, module: str, kind: str) -> Tensor:
        """The float32 factor behind an integer tensor and its scales."""
        values, scale = self.tensors[f"{module}.{kind}"], self.tensors[f"{module}.scale"].float()
        if kind == "i4":
            low, high = (values & 15).float() - 8, (values >> 4).float() - 8
            values = torch.stack([low, high], -1).flatten(1)
        runs = values.float().view(len(values), scale.shape[1], -1)
        return (runs * scale[..., None]).flatten(1)


def _verified(folder: Path) -> list[Path]:
    """The folder's safetensors files; each must match a checksum in its README or SHA256SUMS."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise InputError(f"{folder}: no safetensors files, so not a delta folder")
    notes = [path for path in (folder / "SHA256SUMS", folder / "README.md") if path.is_file()]
    listed = " ".join(path.read_text(encoding="utf-8") for path in notes)
    sums = set(re.findall(r"\b[0-9a-f]{64}\b", listed))
    for path in files:
        if hashlib.sha256(path.read_bytes()).hexdigest() not in sums:
            raise InputError(f"{path}: checksum is not the one listed in its folder")
    return files


def _target(weights: dict[str, Tensor], name: str) -> Tensor:
    if name not in weights:
        raise InputError(f"the delta changes {name}, which the base model does not have")
    return weights[name]


def _add(weights: dict[str, Tensor], module: str, difference: Tensor) -> None:
    weight = _target(weights, f"{module}.weight")
    if weight.shape != difference.shape:
        raise InputError(f"the delta's shape of {module} does not fit the base model")
    weight.copy_((weight.float() + difference.to(weight.device)).bfloat16())
