"""One executor for every policy: relocate, probe, recover."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from redknot.execution.cache import PromptCache, page_storage
from redknot.execution.clock import Clock
from redknot.execution.layer import Placed, Trip, attention, finish
from redknot.execution.parts import EAGER, Parts
from redknot.execution.probe import ProbePass
from redknot.execution.recover import Executed, Recovery
from redknot.execution.transfer import on_device
from redknot.execution.turns import Turns, drained
from redknot.execution.visibility import Visibility, global_groups
from redknot.heads import HeadMap
from redknot.kernels.attend import Impl
from redknot.models import Adapter, LayerShape
from redknot.recovery import Flops, Layout, Plan, Policy, plan_flops
from redknot.recovery.policies import Dense
from redknot.recovery.selection import simulate
from redknot.segments import Lookup

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutionSettings:
    """How passes are cut."""

    chunk_tokens: int | None = None
    "Positions of one chunk of a static plan; None runs the prompt at once."
    row_block: int | None = None
    "Rows of one call of the torch backend; None is what the device likes."
    attention: Impl = "auto"
    "Backend of attention; only `auto` may choose."
    page_size: int | None = None
    "Tokens of a page of one KV head; None is what the device likes."
    num_pages: int | None = None
    "Pages of the pool; None lets it grow as requests need more."
    compiled: bool = True
    "Whether the static parts of layers are compiled, on a GPU."


@dataclass(frozen=True, eq=False)
class Prefilled:
    """A prompt that is ready to decode."""

    token_ids: Int[Tensor, "token"]
    cache: PromptCache
    sight: Visibility
    logits: Float[Tensor, "vocab"]
    "Of the first new token."
    executed: Executed
    layout: Layout
    "What the policy took over."
    known: Layout
    "What it could have taken over."
    shapes: Sequence[LayerShape]
    clock: Clock

    @property
    def exact_tokens(self) -> int:
        """First tokens whose state is what dense computes: nothing reused, no row windowed."""
        reused = self.layout.reusable.nonzero()
        tokens = int(reused[0]) if len(reused) else self.layout.num_tokens
        layers = (*self.sight.prefill, *self.sight.decode)
        windows = [reach.window for layer in layers for reach in layer if reach.window]
        return min([tokens, *windows])

    def retain(self) -> "Prefilled":
        """Give back what the question's phase no longer sees, now and as decoding goes on.

        Works in place and returns itself; the cache can only go forward from here. `fork` first
        where the whole is still needed.
        """
        if self.sight.hides:
            self.cache.retain(self.sight.retention())
        return self

    def fork(self) -> "Prefilled":
        """The same prompt once more; pages are shared until one of the two grows."""
        return replace(self, cache=self.cache.fork())

    @cached_property
    def plan(self) -> Plan:
        """What was executed."""
        return self.executed.plan()

    @property
    def seconds(self) -> dict[str, float]:
        """By stage: relocate, probe, recover, and what the caller has marked before and after."""
        return self.clock.seconds

    @cached_property
    def flops(self) -> Flops:
        """What was executed, the common prefix left out."""
        return plan_flops(
            self.plan,
            self.layout,
            self.shapes,
            self.sight.prefill,
            self.sight.decode,
            prefix=self.known.common_prefix,
        )

    @cached_property
    def dense_flops(self) -> Flops:
        """What the unmodified model spends on the same prompt behind its common prefix."""
        bare = self.known.limited(exact=0, segments=False)
        whole = Visibility.of(self.shapes, 0)
        plan = simulate(Dense(), bare, len(self.shapes), global_groups(self.shapes, None))
        return plan_flops(
            plan,
            bare,
            self.shapes,
            whole.prefill,
            whole.decode,
            prefix=self.known.common_prefix,
            pruned=False,
        )

    @property
    def flops_share(self) -> float:
        """FLOPs over dense's for the same prompt; a common prefix is left out of both."""
        return self.flops.total / max(1, self.dense_flops.total)


class Executor:
    """Runs requests of one model, one at a time."""

    def __init__(
        self,
        adapter: Adapter,
        settings: ExecutionSettings = ExecutionSettings(),
    ) -> None:
        self.adapter, self.settings = adapter, settings
        self.storage = page_storage(adapter, settings.page_size, settings.num_pages)
        self.shapes = [layer.shape for layer in adapter.layers]
        compiled = settings.compiled and adapter.device.type == "cuda"
        self.parts = Parts.compiled() if compiled else EAGER
        self._probe = ProbePass(adapter)

    def prefill(
        self,
        token_ids: Int[Tensor, "token"],
        lookup: Lookup,
        policy: Policy,
        head_map: HeadMap | None = None,
        *,
        beginning: PromptCache | None = None,
        clock: Clock | None = None,
    ) -> Prefilled:
        """From token ids and known state to the first token's logits.

        ``beginning`` holds the tokens that ``lookup`` calls exact, and maybe more; without it, or
        where its pages were given back meanwhile, they are computed. A ``clock`` of the caller's
        goes on with the stages of this call.
        """
        turns = self.prefilling(
            token_ids, lookup, policy, head_map, beginning=beginning, clock=clock
        )
        return drained(turns)

    @torch.inference_mode()
    def prefilling(
        self,
        token_ids: Int[Tensor, "token"],
        lookup: Lookup,
        policy: Policy,
        head_map: HeadMap | None = None,
        *,
        beginning: PromptCache | None = None,
        clock: Clock | None = None,
        copied: bool = False,
    ) -> Turns[Prefilled]:
        """As `prefill`, in turns; ``copied`` is as in `PromptCache`."""
        if policy.needs_head_map and head_map is None:
            raise ValueError(f"policy {policy.name} needs a head map")
        layout = policy.view(lookup.layout)
        if beginning is None or beginning.length < layout.exact:  # it was let go of meanwhile
            layout = layout.limited(exact=0, segments=True)
        sight = Visibility.of(self.shapes, layout.context_end, head_map, policy.windows)
        clock = clock or Clock(self.adapter.device)
        clock.come_back()
        with clock.stage("relocate"):
            cache = yield from _pausing(
                self._relocated(layout, lookup, policy, beginning, copied), clock
            )
        mass = None
        if policy.uses_probe and len(layout.stored):
            with clock.stage("probe"):
                seeing = self._trip(cache, Visibility.of(self.shapes, 0), clock=clock)
                turns = self._probe.mass(seeing, cache, token_ids, layout)
                mass = yield from _pausing(turns, clock)
                cache.trim(layout.num_tokens)  # the probe's rows, which no window has given back
        with clock.stage("recover"):
            groups = global_groups(self.shapes, head_map)
            trip = self._trip(cache, sight, clock)
            recovery = Recovery(self.adapter, trip, token_ids, layout, policy, groups, mass)
            running = self._in_chunks(recovery, cache, trip.sight, layout, policy)
            hidden = yield from _pausing(running, clock)
            logits = self.adapter.logits(hidden)[-1]
        return Prefilled(
            token_ids=token_ids,
            cache=cache,
            sight=sight,
            logits=logits,
            executed=recovery.executed,
            layout=layout,
            known=lookup.layout,
            shapes=self.shapes,
            clock=clock,
        )

    @torch.inference_mode()
    def extend(
        self, prefilled: Prefilled, token_ids: Int[Tensor, "new"]
    ) -> Float[Tensor, "new vocab"]:
        """Append tokens to the prompt; logits behind each of them."""
        return self.adapter.logits(drained(self.appending(prefilled, token_ids)))

    @torch.inference_mode()
    def appending(
        self, prefilled: Prefilled, token_ids: Int[Tensor, "new"]
    ) -> Turns[Float[Tensor, "new hidden"]]:
        """Append tokens to the prompt, in turns; hidden states behind the last layer."""
        cache = prefilled.cache
        positions = torch.arange(cache.length, cache.length + len(token_ids))
        cache.reserve(cache.length + len(token_ids))
        placed = Placed.at(self.adapter, positions)
        trip = self._trip(cache, prefilled.sight)
        hidden = self.adapter.embed(token_ids.to(self.adapter.device))
        for index, layer in enumerate(self.adapter.layers):
            found = attention(trip, index, layer, placed, hidden)
            hidden = finish(layer, hidden, found.out, parts=self.parts)
            yield len(token_ids)
        cache.evict()
        return hidden

    def _trip(
        self,
        cache: PromptCache,
        sight: Visibility,
        clock: Clock | None = None,
    ) -> Trip:
        impl, row_block = self.settings.attention, self.settings.row_block
        return Trip(cache, sight, impl, row_block, parts=self.parts, clock=clock)

    def _relocated(
        self,
        layout: Layout,
        lookup: Lookup,
        policy: Policy,
        beginning: PromptCache | None,
        copied: bool,
    ) -> Turns[PromptCache]:
        """A cache with all known state in place, in turns of which the first takes the pages.

        Chunks of a plan with windows take them one by one, as windows give back others.
        """
        tokens = layout.num_tokens
        if self._chunk_tokens(policy) is not None and policy.windows.on_context:
            tokens = max([layout.exact, *(stop for _, stop in layout.segments)])
        if beginning is not None and layout.exact:
            cache = beginning.fork()
            cache.truncate(layout.exact)
            cache.reserve(tokens)
        else:
            cache = PromptCache.allocate(self.adapter, tokens, self.storage, copied=copied)
        yield 0
        hits = lookup.hits if layout.segments else ()
        states = on_device([state for _, state in hits], self.adapter.device)
        for (span, _), state in zip(hits, states, strict=True):
            behind = max(0, layout.exact - span.start)
            if behind < len(span):
                cache.place(self.adapter, state, span.start, len(span), behind)
            yield len(span)
        return cache

    def _chunk_tokens(self, policy: Policy) -> int | None:
        return None if policy.adaptive else self.settings.chunk_tokens

    def _in_chunks(
        self,
        recovery: Recovery,
        cache: PromptCache,
        sight: Visibility,
        layout: Layout,
        policy: Policy,
    ) -> Turns[Float[Tensor, "row hidden"]]:
        step = self._chunk_tokens(policy)
        if step is None:
            return (yield from recovery.run(0, layout.num_tokens))
        retention = sight.retention()
        for start in range(layout.exact, layout.num_tokens, step):
            stop = min(start + step, layout.num_tokens)
            cache.reserve(stop)
            hidden = yield from recovery.run(start, stop)
            cache.evict(retention, stop)
        return hidden


def _pausing(turns: Turns[T], clock: Clock) -> Generator[int, None, T]:
    """Every pause charged to those who take their turn meanwhile."""
    while True:
        try:
            rows = next(turns)
        except StopIteration as end:
            return end.value
        clock.leave()
        yield rows
        clock.come_back()
