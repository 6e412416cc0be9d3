"""The planner: predicts what a plan and dense would take, and runs dense where a plan loses."""

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch

from redknot.execution.cache import PromptCache, page_storage
from redknot.execution.executor import Executor
from redknot.execution.layer import Placed, Trip, attention, finish
from redknot.execution.visibility import Visibility, global_groups
from redknot.heads import HeadMap, visible_pairs
from redknot.kernels.attend import AttendPlan, Part, Reach, Rows, attend
from redknot.recovery import Layout, Policy, plan_flops
from redknot.recovery.cost import Rates
from redknot.recovery.flops import RELOCATION_FLOPS
from redknot.recovery.policies import Dense
from redknot.recovery.selection import simulate
from redknot.segments import SegmentState

WORTH = 0.95  # a plan must be predicted to take less than this share of dense's time
CALIBRATION = {"cpu": (512, 2048), "cuda": (4096, 16384)}
"Rows of the FFN and tokens of attention, by device: enough to fill it."
MOST_KNOWN = 4096
"Predictions that are kept: counting the layers of a plan takes 10 ms, as long as a short prompt."
LAYERS = 8
"Layers whose relocation is timed at once: what a launch costs counts little then."


@dataclass(frozen=True, slots=True)
class Decision:
    """Which policy runs, and why."""

    policy: Policy
    reason: str
    predicted: float | None = None
    "Seconds of the asked policy; None where nothing had to be predicted."
    predicted_dense: float | None = None


class Planner:
    """Decides for one executor; calibrates at the first decision, or when told to."""

    def __init__(self, executor: Executor, instead: Policy = Dense()) -> None:
        """``instead`` runs where a policy would lose: dense, or prefix if prompts share pages."""
        self._executor, self._instead = executor, instead
        self._rates: Rates | None = None
        self._known: dict[Hashable, tuple[HeadMap | None, float]] = {}

    def decide(
        self,
        layout: Layout,
        policy: Policy,
        head_map: HeadMap | None,
        dense_layout: Layout | None = None,
    ) -> Decision:
        """``policy``, or dense where nothing is stored or the plan is predicted to lose.

        ``dense_layout`` is what dense would find, if that is something else.
        """
        if policy.takes_segments is False:
            return Decision(policy, "asked for")
        if policy.takes_segments and not layout.segments and not layout.exact:
            return Decision(self._instead, "no segment of the prompt is stored")
        asked = self._predict(policy.view(layout), policy, head_map)
        instead = self._instead
        dense = self._predict(instead.view(dense_layout or layout), instead, None)
        if asked > WORTH * dense:
            reason = f"{policy.name} is predicted to take {asked:.3f} s, dense {dense:.3f} s"
            return Decision(instead, reason, asked, dense)
        return Decision(policy, "predicted to pay", asked, dense)

    def calibrate(self) -> Rates:
        """What this machine does with this model, measured once."""
        if self._rates is None:
            self._rates = calibrate(self._executor)
        return self._rates

    def _predict(self, layout: Layout, policy: Policy, head_map: HeadMap | None) -> float:
        """Seconds; prompts whose counts are within a few per cent are predicted once."""
        counts = layout.num_tokens, layout.exact, len(layout.stored), layout.probe[0]
        alike = (policy, id(head_map), layout.probe_follows_context, *map(_rounded, counts))
        if alike not in self._known:
            if len(self._known) == MOST_KNOWN:
                del self._known[next(iter(self._known))]
            self._known[alike] = head_map, self._count(layout, policy, head_map)
        return self._known[alike][1]

    def _count(self, layout: Layout, policy: Policy, head_map: HeadMap | None) -> float:
        shapes = self._executor.shapes
        groups = global_groups(shapes, head_map)
        plan = simulate(policy, layout, len(shapes), groups)
        sight = Visibility.of(shapes, layout.context_end, head_map, policy.windows)
        return self.calibrate().seconds(
            plan_flops(plan, layout, shapes, sight.prefill, sight.decode), plan
        )


def _rounded(count: int) -> int:
    """Five significant bits: at most 3 % off."""
    spare = max(0, count.bit_length() - 5)
    return count >> spare << spare


@torch.inference_mode()
def calibrate(executor: Executor) -> Rates:
    """Measure the parts of one layer on random states (0.3 s for the embedded model on 2 cores)."""
    adapter, shape, parts = executor.adapter, executor.shapes[0], executor.parts
    layer, device = adapter.layers[0], adapter.device
    num_rows, tokens = CALIBRATION[device.type]
    hidden = adapter.embed(torch.zeros(num_rows, dtype=torch.int64, device=device))
    hidden = torch.randn_like(hidden)
    layers = min(LAYERS, len(adapter.layers))
    cache = PromptCache(page_storage(adapter), layers, shape.num_groups)
    cache.reserve(tokens)
    for plane in cache.storage.planes.values():
        plane.normal_()
    heads = shape.num_groups * shape.queries_per_group
    query = torch.randn(heads, tokens, shape.head_dim, dtype=adapter.dtype, device=device)
    whole = Rows.at(torch.arange(tokens), device)
    some = Rows.at(torch.arange(0, tokens, tokens // num_rows), device)
    reaches = (Reach(),) * shape.num_groups

    def attention_rate(rows: Rows) -> float:
        flops = visible_pairs(rows.host, Reach()) * shape.num_groups * shape.attention_pair_flops
        picked, plan = query[:, rows.device], AttendPlan.of(Part(0, rows, reaches))
        impl = executor.settings.attention
        spent = _time(
            device, lambda: attend(picked, cache.layer(0), plan, scale=shape.scale, impl=impl)
        )
        return flops / spent

    state = SegmentState(
        torch.zeros(num_rows, dtype=torch.int64),
        dict(zip(("key", "value"), cache.first(num_rows), strict=True)),
    )
    elements = num_rows * shape.num_groups * shape.head_dim * layers
    placing = _time(device, lambda: cache.place(adapter, state, 0, num_rows))
    one = Placed.at(adapter, torch.tensor([tokens - 1]))
    sight = Visibility.of(executor.shapes, 0)
    trip = Trip(cache, sight, executor.settings.attention, parts=parts)

    def one_row() -> None:
        finish(layer, hidden[:1], attention(trip, 0, layer, one, hidden[:1]).out, parts=parts)

    return Rates(
        matmul=num_rows * shape.cost.ffn / _time(device, lambda: parts.ffn(layer, hidden)),
        causal=attention_rate(whole),
        gathered=attention_rate(some),
        relocate=RELOCATION_FLOPS * elements / placing,
        layer_overhead=_time(device, one_row),
    )


def _time(device: torch.device, run: Callable[[], object], repeats: int = 3) -> float:
    """Least of a few timed calls, after one untimed."""
    spent = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        spent.append(time.perf_counter() - start)
    return min(spent[1:])
