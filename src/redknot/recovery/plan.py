"""Plans as data: which tokens flow through which layer, and what becomes of their state."""

from dataclasses import dataclass
from math import floor
from pathlib import Path

import msgspec
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from redknot.errors import InputError


@dataclass(frozen=True, slots=True, eq=False)
class LayerPlan:
    """One layer. Positions are of the prompt, sorted, on the host."""

    active: Int[Tensor, "row"]
    "A: flow through the layer."
    ffn: Int[Tensor, "some"] | None = None
    "F: the active tokens that run the FFN; None is all."
    publish: Bool[Tensor, "group row"] | None = None
    "P: whose fresh K/V replace the reused ones; None is all."
    ranked: int = 0
    "Rows whose K/V were projected only to rank them."


class SavedLayer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A layer on disk: row sets by index into the file's table, publish as one set a group."""

    active: int
    ffn: int | None = None
    publish: list[int] | None = None
    ranked: int = 0


class SavedPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A plan on disk. Row sets are runs [start, stop)."""

    version: int = 1
    policy: str
    num_tokens: int
    probe_rows: int
    row_sets: list[list[tuple[int, int]]]
    layers: list[SavedLayer]


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """All layers of one request, as made by ``policy``."""

    policy: str
    num_tokens: int
    layers: tuple[LayerPlan, ...]
    probe_rows: int = 0
    "Rows of the question pass that ranked the tokens; 0 without one."

    @property
    def cached_tokens(self) -> int:
        """Work really saved, in prompt tokens: a token counts by the share of layers it skipped."""
        computed = sum(len(layer.active) for layer in self.layers)
        return floor(self.num_tokens - computed / len(self.layers))

    def describe(self) -> str:
        """A line for each run of layers with the same numbers of rows."""
        lines = [f"{self.policy}: {self.num_tokens} tokens, question pass {self.probe_rows} rows"]
        counts = [_counts(layer) for layer in self.layers]
        start = 0
        for end in range(1, len(counts) + 1):
            if end == len(counts) or counts[end] != counts[start]:
                active, ffn, publish = counts[start]
                lines.append(
                    f"layers {start}-{end - 1}: active {active}, ffn {ffn}, publish {publish}"
                )
                start = end
        return "\n".join(lines)

    def differs(self, other: "Plan") -> list[str]:
        """What distinguishes two plans, a line for each layer; empty for equal plans."""
        if len(self.layers) != len(other.layers) or self.num_tokens != other.num_tokens:
            return ["plans of another model or prompt"]
        found = []
        for index, (mine, theirs) in enumerate(zip(self.layers, other.layers, strict=True)):
            gone = len(set(mine.active.tolist()) - set(theirs.active.tolist()))
            new = len(set(theirs.active.tolist()) - set(mine.active.tolist()))
            same = _same(mine.ffn, theirs.ffn) and _same(mine.publish, theirs.publish)
            if gone or new or not same:
                found.append(f"layer {index}: -{gone} +{new} active" + ("" if same else ", ffn/kv"))
        return found

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        table: dict[tuple[tuple[int, int], ...], int] = {}

        def entry(positions: Tensor) -> int:
            return table.setdefault(_runs(positions), len(table))

        layers = [
            SavedLayer(
                active=entry(layer.active),
                ffn=None if layer.ffn is None else entry(layer.ffn),
                publish=None
                if layer.publish is None
                else [entry(layer.active[mask]) for mask in layer.publish],
                ranked=layer.ranked,
            )
            for layer in self.layers
        ]
        saved = SavedPlan(
            policy=self.policy,
            num_tokens=self.num_tokens,
            probe_rows=self.probe_rows,
            row_sets=[list(runs) for runs in table],
            layers=layers,
        )
        Path(path).write_bytes(msgspec.json.encode(saved))

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        """Read a plan that `save` wrote."""
        try:
            saved = msgspec.json.decode(Path(path).read_bytes(), type=SavedPlan)
        except OSError as error:
            raise InputError(f"{path}: {error.strerror or error}") from error
        except (msgspec.DecodeError, ValueError) as error:
            raise InputError(f"{path}: not a plan: {error}") from error
        try:
            return cls._restored(saved)
        except ValueError as error:
            raise InputError(f"{path}: not a plan: {error}") from error

    @classmethod
    def _restored(cls, saved: SavedPlan) -> "Plan":
        if saved.version != 1:
            raise ValueError(f"version {saved.version}, this release reads 1")
        ends = [0, *(border for runs in saved.row_sets for run in runs for border in run)]
        if max(ends) > saved.num_tokens:
            raise ValueError("it has rows beyond its prompt")
        sets = [_positions(runs) for runs in saved.row_sets]
        layers = tuple(_restore(layer, sets) for layer in saved.layers)
        return cls(saved.policy, saved.num_tokens, layers, saved.probe_rows)


def _restore(saved: SavedLayer, sets: list[Tensor]) -> LayerPlan:
    used = [saved.active, *(saved.publish or []), *([] if saved.ffn is None else [saved.ffn])]
    if not all(0 <= index < len(sets) for index in used):
        raise ValueError("it names a set of rows that it does not hold")
    active = sets[saved.active]
    publish = None
    if saved.publish is not None:
        publish = torch.stack([torch.isin(active, sets[index]) for index in saved.publish])
    ffn = None if saved.ffn is None else sets[saved.ffn]
    return LayerPlan(active, ffn, publish, saved.ranked)


def _runs(positions: Tensor) -> tuple[tuple[int, int], ...]:
    if not len(positions):
        return ()
    breaks = (positions.diff() != 1).nonzero().flatten() + 1
    return tuple(
        (int(run[0]), int(run[-1]) + 1) for run in torch.tensor_split(positions, breaks.cpu())
    )


def _positions(runs: list[tuple[int, int]]) -> Tensor:
    borders = [border for run in runs for border in run]
    if borders != sorted(set(borders)) or any(border < 0 for border in borders):
        raise ValueError("its runs of rows do not ascend")
    parts = [torch.arange(start, stop) for start, stop in runs]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)


def _same(mine: Tensor | None, theirs: Tensor | None) -> bool:
    if mine is None or theirs is None:
        return mine is theirs
    return torch.equal(mine, theirs)


def _counts(layer: LayerPlan) -> tuple[int, int, str]:
    active = len(layer.active)
    ffn = active if layer.ffn is None else len(layer.ffn)
    publish = "all" if layer.publish is None else "/".join(map(str, layer.publish.sum(1).tolist()))
    return active, ffn, publish
