"""Direct ablation on the question stage: window one group at a time over one dense cache.

All groups of a model run in one batched question pass. A variant is born at the layer of its
group, so layers below it are computed once for all.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from redknot.execution.layer import Placed, finish
from redknot.kernels.attend import Reach
from redknot.kernels.attend.reference import visible
from redknot.models import Adapter, Layer

VARIANTS_AT_ONCE = 8  # bounds the scores that stand in memory


@dataclass(frozen=True, slots=True, eq=False)
class Observation:
    """What one prompt says about every group."""

    ablation: Float[Tensor, "layer group"]
    "KL of the gold answer's distributions when this group alone is windowed, in nats a token."
    edge: Float[Tensor, "layer group"]
    "Attention mass of the question's rows outside sink and window, the largest of the group."
    important: Float[Tensor, "layer"]
    "Share of context tokens in the union, over query heads, of those carrying 90 % of the mass."
    important_per_head: Float[Tensor, "layer"]
    "The same share for one query head, on average."


@torch.inference_mode()
def observe(
    adapter: Adapter,
    context: tuple[Float[Tensor, "layer group token dim"], Float[Tensor, "layer group token dim"]],
    tail: Int[Tensor, "row"],
    answer_tokens: int,
    reach: Reach,
) -> Observation:
    """Run ``tail`` (question and gold answer, less its last token) over dense's ``context`` K/V.

    The last ``answer_tokens`` rows are those before a token of the gold answer.
    """
    pass_ = _TailPass(adapter, context, tail, reach)
    hidden = adapter.embed(tail.to(adapter.device))[None]
    for index, layer in enumerate(adapter.layers):
        hidden = pass_.layer(index, layer, hidden)
    kl = _divergence(adapter, hidden[:, -answer_tokens:])
    shape = adapter.layers[0].shape
    return Observation(
        ablation=kl.view(len(adapter.layers), shape.num_groups).cpu(),
        edge=torch.stack(pass_.edge).cpu(),
        important=torch.tensor(pass_.union),
        important_per_head=torch.tensor(pass_.single),
    )


class _TailPass:
    """A batch of variants over one context; the first is dense."""

    def __init__(
        self,
        adapter: Adapter,
        context: tuple[Tensor, Tensor],
        tail: Int[Tensor, "row"],
        reach: Reach,
    ) -> None:
        self._keys, self._values = context
        self._tokens = self._keys.shape[2]
        positions = torch.arange(self._tokens, self._tokens + len(tail))
        self._placed = Placed.at(adapter, positions)
        total, device = self._tokens + len(tail), adapter.device
        self._masks = {
            horizon: tuple(
                visible(positions, total, one._replace(horizon=horizon)).to(device)
                for one in (Reach(), reach)
            )
            for horizon in {layer.shape.horizon for layer in adapter.layers}
        }
        self.edge: list[Tensor] = []
        self.union: list[float] = []
        self.single: list[float] = []

    def layer(
        self, index: int, layer: Layer, hidden: Float[Tensor, "variant row hidden"]
    ) -> Float[Tensor, "more row hidden"]:
        """All variants through one layer, and those that are born in it."""
        variants, rows = hidden.shape[:2]
        normed = layer.attention_input(hidden.flatten(0, 1))
        split = (layer.shape.num_groups, -1, variants, rows, layer.shape.head_dim)
        table = Placed(
            self._placed.rows,
            self._placed.cosine.repeat(variants, 1),
            self._placed.sine.repeat(variants, 1),
        )
        query = table.rotate(layer.queries(normed)).view(split)
        key = table.rotate(layer.keys(normed)).view(split)[:, 0]
        value = layer.values(normed).view(split)[:, 0]
        attended = torch.cat(
            [
                self._attend(index, layer, query[:, :, part], key[:, part], value[:, part])
                for part in torch.split(torch.arange(variants), VARIANTS_AT_ONCE)
            ]
        )  # [variant, row, group, query, dim]
        self._observe(index, layer, query[:, :, 0], key[:, 0])
        windowed = self._attend(
            index, layer, query[:, :, :1], key[:, :1], value[:, :1], windowed=True
        )
        born = attended[:1].repeat(layer.shape.num_groups, 1, 1, 1, 1)
        for group in range(layer.shape.num_groups):
            born[group, :, group] = windowed[0, :, group]
        flat = torch.cat([attended, born]).flatten(2)
        stream = torch.cat([hidden, hidden[:1].repeat(layer.shape.num_groups, 1, 1)])
        return finish(layer, stream.flatten(0, 1), flat.flatten(0, 1)).view_as(stream)

    def _attend(
        self,
        index: int,
        layer: Layer,
        query: Float[Tensor, "group query variant row dim"],
        key: Float[Tensor, "group variant row dim"],
        value: Float[Tensor, "group variant row dim"],
        *,
        windowed: bool = False,
    ) -> Float[Tensor, "variant row group query dim"]:
        outputs = []
        for group in range(query.shape[0]):
            mass = self._probabilities(index, layer, group, query[group], key[group], windowed)
            seen, own = mass[..., : self._tokens], mass[..., self._tokens :]
            outputs.append(seen @ self._values[index, group] + own @ value[group])
        return torch.stack(outputs).permute(2, 3, 0, 1, 4)

    def _probabilities(
        self,
        index: int,
        layer: Layer,
        group: int,
        query: Float[Tensor, "query variant row dim"],
        key: Float[Tensor, "variant row dim"],
        windowed: bool = False,
    ) -> Float[Tensor, "query variant row token"]:
        scores = torch.cat([query @ self._keys[index, group].T, query @ key.transpose(-1, -2)], -1)
        mask = self._masks[layer.shape.horizon][windowed]
        scores = (scores.float() * layer.shape.scale).masked_fill_(~mask, float("-inf"))
        return scores.softmax(-1).to(query.dtype)

    def _observe(
        self,
        index: int,
        layer: Layer,
        query: Float[Tensor, "group query row dim"],
        key: Float[Tensor, "group row dim"],
    ) -> None:
        """Signals of the dense variant's attention."""
        edges, needed = [], []
        for group in range(query.shape[0]):
            mass = self._probabilities(
                index, layer, group, query[group][:, None], key[group][None]
            )[:, 0]
            outside = ~self._masks[layer.shape.horizon][True]
            edges.append((mass * outside).sum(-1).mean(-1).max().float())
            column = mass[..., : self._tokens].float().mean(1)
            needed.append(_carrying(column, 0.9))
        sets = torch.cat(needed)
        self.edge.append(torch.stack(edges))
        self.union.append(float(sets.any(0).float().mean()))
        self.single.append(float(sets.float().mean()))


def _carrying(mass: Float[Tensor, "head token"], share: float) -> Tensor:
    """The fewest tokens of each head that add up to ``share`` of its mass."""
    ordered, order = mass.sort(-1, descending=True)
    reached = ordered.cumsum(-1) / ordered.sum(-1, keepdim=True)
    needed = (reached - ordered / ordered.sum(-1, keepdim=True)) < share
    return torch.zeros_like(needed).scatter(-1, order, needed)


def _divergence(
    adapter: Adapter, hidden: Float[Tensor, "variant row hidden"]
) -> Float[Tensor, "variant-1"]:
    """KL of each variant's next-token distributions from the first's."""
    dense = adapter.logits(hidden[0]).log_softmax(-1)
    return torch.stack(
        [
            (dense.exp() * (dense - adapter.logits(one).log_softmax(-1))).sum(-1).mean()
            for one in hidden[1:]
        ]
    )
