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
        """Add the differences in place, each sum rounded to bfloat16 as in training.

        `InputError`, before anything is changed, for tensors that nothing reads or that do not fit.
        """
        weights = model.state_dict()
        unread = set(self.tensors)
        changes = [
            change for name in self.tensors for change in self._change(name, weights, unread)
        ]
        if unread:
            raise InputError(f"the delta holds {min(unread)}, which nothing reads")
        with torch.no_grad():
            for weight, value in changes:
                weight.copy_(value)

    def _change(
        self, name: str, weights: dict[str, Tensor], unread: set[str]
    ) -> list[tuple[Tensor, Tensor]]:
        """The weight that tensor ``name`` changes and its new value; none for parts of others."""
        module, _, kind = name.rpartition(".")
        if name.endswith("norm.weight"):
            unread.discard(name)
            weight, value = _target(weights, name), self.tensors[name]
            _same_shape(name, weight, value)
            return [(weight, value)]
        if kind not in ("i4", "i8") or module.endswith(".lora_B"):
            return []
        if module.endswith(".delta"):
            target = module.removesuffix(".delta")
            difference = self._dense(module, unread)
        else:
            target = module.removesuffix(".lora_A")
            low, high = self._dense(module, unread), self._dense(target + ".lora_B", unread)
            if high.shape[1] != low.shape[0]:
                raise InputError(f"the delta's factors of {target} have different ranks")
            difference = float(self.settings.get("lora_scale", 1)) * high @ low
        weight = _target(weights, f"{target}.weight")
        _same_shape(target, weight, difference)
        base = weight.bfloat16().float()  # the base that the delta was trained on
        return [(weight, (base + difference.to(weight.device)).bfloat16())]

    def _dense(self, module: str, unread: set[str]) -> Tensor:
        """The float32 factor behind an integer tensor and its scales."""
        found = [f"{module}.{kind}" for kind in ("i4", "i8") if f"{module}.{kind}" in self.tensors]
        if not found or f"{module}.scale" not in self.tensors:
            raise InputError(f"the delta lacks the factor {module} or its scales")
        unread.difference_update((found[0], f"{module}.scale"))
        values, scale = self.tensors[found[0]], self.tensors[f"{module}.scale"].float()
        if found[0].endswith("i4"):
            low, high = (values & 15).float() - 8, (values >> 4).float() - 8
            values = torch.stack([low, high], -1).flatten(1)
        if scale.dim() != 2 or len(scale) != len(values) or values.shape[1] % scale.shape[1]:
            raise InputError(f"the delta's scales of {module} do not fit")
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


def _same_shape(name: str, weight: Tensor, value: Tensor) -> None:
    if weight.shape != value.shape:
        raise InputError(f"the delta's shape of {name} does not fit the base model")
