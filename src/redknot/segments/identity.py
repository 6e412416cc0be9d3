"""Keys of stored state: a digest of the tokens and of all that shapes their state."""

import hashlib
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

FORMAT = b"redknot-segment-1"


@dataclass(frozen=True, slots=True)
class Namespace:
    """All that shapes a segment's state besides its tokens. One difference makes a miss."""

    weights: str
    "Fingerprint of the weights, adapters and quantisation included."
    settings: str
    "Config that shapes state besides weights and rotary angles."
    rotary: str
    dtype: str
    anchor: tuple[int, ...]
    "Token ids that canonical state is computed behind."
    state: str = "kv"
    salt: str = ""
    "Tenant."

    def key(self, kind: str, token_ids: Int[Tensor, "token"]) -> bytes:
        """SHA-256 of an unambiguous encoding: every field stands behind its length."""
        digest = hashlib.sha256()
        anchor = b"".join(token.to_bytes(8, "little") for token in self.anchor)
        fields = (self.weights, self.settings, self.rotary, self.dtype, self.state, self.salt, kind)
        encoded = [FORMAT, anchor, *(field.encode() for field in fields)]
        for part in (*encoded, token_ids.to("cpu", torch.int64).contiguous().numpy().tobytes()):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
        return digest.digest()
