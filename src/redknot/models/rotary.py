"""Rotary angles of a model: accepted kinds, frequencies and tables, always in float32."""

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PretrainedConfig

from redknot.errors import InputError

# Kinds whose angles depend on the position alone. `dynamic` and `longrope` choose frequencies by
# the length of the whole prompt, so state made at one length is wrong at another.
STATIC_KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True, eq=False)
class Rotary:
    """Frequencies of one model and the magnitude that some kinds put on cosine and sine."""

    kind: str
    inv_freq: Float[Tensor, "half"]
    magnitude: float

    @classmethod
    def of(cls, module: Any, config: PretrainedConfig) -> "Rotary":
        """Frequencies as the model's own rotary ``module`` makes them from ``config``.

        The module is made anew, since casting a model to bfloat16 may cast its frequencies too.
        """
        kind = config.rope_parameters.get("rope_type", "default")
        if kind not in STATIC_KINDS:
            raise InputError(
                f"rotary kind {kind!r} depends on the prompt's length and is not supported"
                f" (supported: {', '.join(STATIC_KINDS)})"
            )
        if "rope_theta" not in config.rope_parameters:
            raise InputError("the model's config has no rope_theta")
        device = module.inv_freq.device
        with torch.device("cpu"):
            fresh = type(module)(config)
        inv_freq = fresh.inv_freq.float().to(device)
        return cls(kind, inv_freq, float(fresh.attention_scaling))

    def table(
        self, positions: Int[Tensor, "row"]
    ) -> tuple[Float[Tensor, "row half"], Float[Tensor, "row half"]]:
        """Cosine and sine at ``positions``, magnitude included."""
        angles = positions[:, None].float() * self.inv_freq
        return angles.cos() * self.magnitude, angles.sin() * self.magnitude

    def identity(self) -> str:
        """Digest of everything that shapes a rotated key."""
        payload = (
            f"{self.kind} {self.magnitude!r} ".encode() + self.inv_freq.cpu().numpy().tobytes()
        )
        return hashlib.sha256(payload).hexdigest()
