"""FLOPs of any plan, counted from its rows and true visible pairs."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from redknot.heads import visible_pairs
from redknot.kernels.attend import Reach
from redknot.models import LayerShape
from redknot.recovery.layout import Layout
from redknot.recovery.plan import LayerPlan, Plan

RELOCATION_FLOPS = 3  # for each element of a rotated key: two products and a sum


@dataclass(frozen=True, slots=True)
class Flops:
    """Operations by what they are spent on."""

    projection: int = 0
    attention: int = 0
    ffn: int = 0
    relocation: int = 0

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(
            self.projection + other.projection,
            self.attention + other.attention,
            self.ffn + other.ffn,
            self.relocation + other.relocation,
        )

    @property
    def total(self) -> int:
        """All of them."""
        return self.projection + self.attention + self.ffn + self.relocation


def plan_flops(
    plan: Plan,
    layout: Layout,
    shapes: Sequence[LayerShape],
    prefill: Sequence[tuple[Reach, ...]],
    decode: Sequence[tuple[Reach, ...]],
    *,
    prefix: int = 0,
    pruned: bool = True,
) -> Flops:
    """FLOPs from the request's token ids to the first token's logits, output head left out.

    The first ``prefix`` tokens count as cached, whether the plan computes them or not. Without
    ``pruned`` all rows finish the last layer, as in the unmodified model.

    ``prefill`` and ``decode`` give the reach of every group by layer for rows before and from
    ``layout.context_end``. Probe, relocation and question are counted. In the last layer only the
    last token needs more than its keys and values, and only that is counted (and executed).
    """
    total, pairs = Flops(), VisiblePairs()
    known: dict[object, Flops] = {}  # of layers that are alike
    for index, (shape, layer) in enumerate(zip(shapes, plan.layers, strict=True)):
        last = pruned and index == len(shapes) - 1
        phases = prefill[index], decode[index]
        alike = id(layer.active), id(layer.ffn), layer.ranked, shape, phases, last
        if alike not in known:
            kept = _behind(layer, prefix)
            known[alike] = layer_flops(kept, layout, shape, *phases, pairs=pairs, last=last)
            known[alike] += Flops(relocation=RELOCATION_FLOPS * _relocated(layout, shape))
        total += known[alike]
    return total + _question_pass(plan, layout, shapes, prefix)


class VisiblePairs:
    """Pairs of sorted rows and visible keys, counted once for all layers that share the rows."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int, Reach], int] = {}

    def count(self, rows: Int[Tensor, "row"], reaches: tuple[Reach, ...]) -> int:
        """Pairs of ``rows`` over all groups; the tensor must outlive this object."""
        return sum(self._count(rows, reach) for reach in reaches) if len(rows) else 0

    def _count(self, rows: Int[Tensor, "row"], reach: Reach) -> int:
        key = rows.data_ptr(), len(rows), reach
        if key not in self._known:
            self._known[key] = visible_pairs(rows, reach)
        return self._known[key]


def _behind(layer: LayerPlan, prefix: int) -> LayerPlan:
    """The rows of a layer from position ``prefix`` on."""
    if not len(layer.active) or int(layer.active[0]) >= prefix:
        return layer
    ffn = None if layer.ffn is None else layer.ffn[layer.ffn >= prefix]
    first = int(torch.searchsorted(layer.active, prefix))
    return LayerPlan(layer.active[first:], ffn, None, layer.ranked)


def layer_flops(
    layer: LayerPlan,
    layout: Layout,
    shape: LayerShape,
    prefill: tuple[Reach, ...],
    decode: tuple[Reach, ...],
    *,
    pairs: VisiblePairs,
    last: bool,
) -> Flops:
    """FLOPs of one layer of a plan."""
    rows, cost = layer.active, shape.cost
    done = rows[-1:] if last else rows
    ffn = 1 if last else len(rows) if layer.ffn is None else len(layer.ffn)
    border = int(torch.searchsorted(done, layout.context_end))
    seen = pairs.count(done[:border], prefill) + pairs.count(done[border:], decode)
    return Flops(
        projection=len(done) * (cost.query + cost.output)
        + (len(rows) + layer.ranked) * cost.key_value,
        attention=seen * shape.attention_pair_flops,
        ffn=ffn * cost.ffn,
    )


def _relocated(layout: Layout, shape: LayerShape) -> int:
    """Key elements of one layer that are rotated from stored state."""
    return (layout.exact + len(layout.stored)) * shape.num_groups * shape.head_dim


def _question_pass(plan: Plan, layout: Layout, shapes: Sequence[LayerShape], prefix: int) -> Flops:
    if not plan.probe_rows:
        return Flops()
    rows = question_rows(layout)
    rows = rows[rows >= prefix]
    layer = LayerPlan(rows)
    probe = probe_rows(layout)
    pairs, known = VisiblePairs(), {}
    for shape in set(shapes):
        reaches = (Reach(horizon=shape.horizon),) * shape.num_groups
        flops = layer_flops(layer, layout, shape, reaches, reaches, pairs=pairs, last=False)
        scored = pairs.count(probe, reaches)
        known[shape] = flops + Flops(attention=scored * shape.attention_pair_flops // 2)
    # The pass ends with the scores of the last layer.
    cost = shapes[-1].cost
    unused = Flops(projection=-len(rows) * cost.output, ffn=-len(rows) * cost.ffn)
    return sum((known[shape] for shape in shapes), unused)


def question_rows(layout: Layout) -> Int[Tensor, "row"]:
    """Rows of the question pass: all without stored state, and the probe's copy if it has one."""
    if layout.probe_follows_context:
        return layout.fresh
    return torch.cat([layout.fresh, probe_rows(layout)])


def probe_rows(layout: Layout) -> Int[Tensor, "row"]:
    start, stop = layout.probe
    if layout.probe_follows_context:
        return torch.arange(start, stop)
    return torch.arange(layout.num_tokens, layout.num_tokens + stop - start)
