"""The head map: class, window and sink of every (layer, visibility group), in two phases."""

import hashlib
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

import msgspec
from jaxtyping import Float
from torch import Tensor

from redknot.errors import InputError
from redknot.heads.reference_layout import read_reference_layout
from redknot.heads.rules import HeadClass, HeadRule, LayerRules
from redknot.kernels.attend import Reach
from redknot.models import Adapter, LayerShape

__all__ = ["HeadClass", "HeadMap", "HeadRule", "Phase"]

VERSION = 1


class Phase(StrEnum):
    """Which rows a rule speaks of."""

    PREFILL = "prefill"  # context rows: up to the end of the last segment
    DECODE = "decode"  # the question's rows and generated tokens


class Measurement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a map was measured and on what."""

    method: str
    window: int
    num_prompts: int
    data: tuple[str, ...]
    scores: tuple[tuple[float, ...], ...]
    "Of every (layer, group); the highest became global."
    split_half: float | None = None
    "Rank correlation of the scores of two halves of the prompts."


class HeadMap(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every group may see. Build with `from_scores` or read with `load`."""

    format: Literal["redknot-head-map"] = "redknot-head-map"
    version: int = VERSION
    model: str = ""
    weights: str | None = None
    "Fingerprint of the weights that were measured; None fits any model of the same shape."
    prefill: LayerRules
    decode: LayerRules
    measured: Measurement | None = None
    checksum: str | None = None

    @classmethod
    def from_scores(
        cls,
        scores: Float[Tensor, "layer group"],
        *,
        global_share: float,
        window: int,
        sink: int = 4,
        decode_global_share: float | None = None,
        decode_window: int | None = None,
        **fields: Any,
    ) -> "HeadMap":
        """The groups with the highest scores become global, the others local."""
        later = global_share if decode_global_share is None else decode_global_share
        return cls(
            prefill=_rules(scores, global_share, HeadRule.local(window, sink)),
            decode=_rules(scores, later, HeadRule.local(decode_window or window, sink)),
            **fields,
        )

    @classmethod
    def load(cls, path: str | Path) -> "HeadMap":
        """Read a map of ours or in the public reference's layout; `InputError` if broken."""
        try:
            content = Path(path).read_bytes()
        except OSError as error:
            raise InputError(f"{path}: {error.strerror or error}") from error
        try:
            raw = msgspec.json.decode(content)
            if isinstance(raw, dict) and "kv_head_classification" in raw:
                rules = read_reference_layout(raw)
                return cls(prefill=rules, decode=rules, model=str(raw.get("model", "")))
            if isinstance(raw, dict) and raw.get("version", VERSION) != VERSION:
                raise InputError(f"head map version {raw['version']}, this release reads {VERSION}")
            head_map = msgspec.json.decode(content, type=cls)
        except (msgspec.DecodeError, ValueError) as error:
            raise InputError(f"{path}: not a head map: {error}") from error
        if head_map.checksum is not None and head_map.checksum != head_map.digest():
            raise InputError(
                f"{path}: checksum differs; remove it if the map was edited on purpose"
            )
        return head_map

    def save(self, path: str | Path) -> None:
        """Write the map with its checksum, whole or not at all."""
        stamped = msgspec.structs.replace(self, checksum=self.digest())
        target = Path(path)
        part = target.with_name(target.name + ".part")
        part.write_bytes(msgspec.json.format(msgspec.json.encode(stamped), indent=1))
        part.replace(target)

    def digest(self) -> str:
        """SHA-256 of everything but the checksum itself."""
        bare = msgspec.structs.replace(self, checksum=None)
        return hashlib.sha256(msgspec.json.encode(bare, order="deterministic")).hexdigest()

    def rules(self, phase: Phase) -> LayerRules:
        """Rules of one phase, ``[layer][group]``."""
        return self.prefill if phase is Phase.PREFILL else self.decode

    def fit(self, adapter: Adapter, weights: str | None = None) -> "HeadMap":
        """The map for this model, query-head rows promoted to KV heads; else `InputError`.

        A group takes the fullest class of its query heads, never a smaller one. A map that names
        the weights it was measured on is refused for others.
        """
        if self.weights is not None and weights is not None and self.weights != weights:
            raise InputError(
                f"the head map was measured on other weights (of {self.model or 'another model'})"
            )
        shapes = [layer.shape for layer in adapter.layers]
        return msgspec.structs.replace(
            self, prefill=_promote(self.prefill, shapes), decode=_promote(self.decode, shapes)
        )

    def reaches(self, phase: Phase, layer: int, horizon: int | None) -> tuple[Reach, ...]:
        """Reach of every group of ``layer`` under the model's own ``horizon``."""
        return tuple(
            Reach(rule.window, rule.sink if rule.window is not None else 0, horizon)
            for rule in self.rules(phase)[layer]
        )

    def global_share(self, phase: Phase) -> float:
        """Share of groups that see everything."""
        flat = [rule for rules in self.rules(phase) for rule in rules]
        return sum(rule.window is None for rule in flat) / len(flat)


def everything(shape: LayerShape) -> tuple[Reach, ...]:
    """Reach of every group of a layer without a head map."""
    return (Reach(horizon=shape.horizon),) * shape.num_groups


def _rules(scores: Float[Tensor, "layer group"], share: float, local: HeadRule) -> LayerRules:
    if not 0 <= share <= 1:
        raise ValueError(f"global share {share} is not between 0 and 1")
    order = scores.flatten().argsort(descending=True, stable=True)
    chosen = set(order[: round(share * scores.numel())].tolist())
    groups = scores.shape[1]
    return tuple(
        tuple(HeadRule() if layer * groups + group in chosen else local for group in range(groups))
        for layer in range(scores.shape[0])
    )


def _promote(rules: LayerRules, shapes: Sequence[LayerShape]) -> LayerRules:
    if len(rules) != len(shapes):
        raise InputError(f"the head map has {len(rules)} layers, the model {len(shapes)}")
    return tuple(_promote_layer(row, shape) for row, shape in zip(rules, shapes, strict=True))


def _promote_layer(row: tuple[HeadRule, ...], shape: LayerShape) -> tuple[HeadRule, ...]:
    if len(row) == shape.num_groups:
        return row
    per_group = shape.queries_per_group
    if len(row) != shape.num_groups * per_group:
        raise InputError(
            f"the head map has {len(row)} heads a layer, the model {shape.num_groups} KV heads"
            f" and {shape.num_groups * per_group} query heads"
        )
    return tuple(
        HeadRule.fullest(row[group * per_group : (group + 1) * per_group])
        for group in range(shape.num_groups)
    )
