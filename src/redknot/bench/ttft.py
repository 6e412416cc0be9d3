"""Time to first token by prompt length: dense, its peers and settings on the same ids."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from redknot.bench.contenders import Contender, compete, of_peer, of_runner
from redknot.bench.context import Bench
from redknot.bench.machine import layer_factor
from redknot.bench.peers import Peers
from redknot.bench.prompts import PromptShape
from redknot.bench.records import TtftLength, TtftRow
from redknot.bench.setting import DENSE, Setting
from redknot.errors import InputError
from redknot.execution.planner import Planner


@dataclass(frozen=True, kw_only=True, slots=True)
class TtftSettings:
    """What is stored, who decides and how often it runs."""

    segment_tokens: int = 2048
    repeats: int = 3
    "Runs of each contender after the first, which compiles."
    cold: bool = False
    "Nothing is stored, and the planner decides."
    planned: bool = False
    "The planner may run dense for a policy."
    peer_max_tokens: int | None = None
    "Beyond this length only the peer that was fastest at the length below runs."
    host_segments: bool = False
    "Segments wait in host memory, page-locked on a GPU, not on the device."
    verify: bool = False
    "Each hit of the store compares a checksum, within the time."

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise InputError(f"{self.repeats} repeats: 1 is the least")

    @property
    def asks_planner(self) -> bool:
        """Whether the planner decides about settings."""
        return self.cold or self.planned


def shapes_of(bench: Bench, lengths: Sequence[int], segment_tokens: int) -> list[PromptShape]:
    """By ascending length; `InputError` before any long work where one cannot run."""
    shapes = [
        PromptShape(tokens=tokens, segment_tokens=segment_tokens) for tokens in sorted(set(lengths))
    ]
    limit = bench.session.model.adapter.context_length
    if shapes[-1].tokens > limit:
        raise InputError(f"{shapes[-1].tokens} tokens, but the model's context holds {limit}")
    return shapes


def ttft(
    bench: Bench,
    shapes: Sequence[PromptShape],
    settings: Sequence[Setting],
    peers: Peers,
    how: TtftSettings,
    planner: Planner | None,
) -> Iterator[TtftLength]:
    """Measure one shape after the other; what one needed is dropped before the next."""
    before: list[TtftRow] = []
    for shape in shapes:
        request = bench.ready(shape)
        built = None if how.cold else bench.build(request)
        contenders = [of_runner(bench.runner(DENSE), bench.matmul_rate)]
        for name, peer in peers.at(shape.tokens, how.peer_max_tokens, before).items():
            contenders.append(of_peer(name, peer, bench.device))
        for setting in settings:
            contenders.append(of_runner(bench.runner(setting, planner), bench.matmul_rate))
        compete(contenders, request, how.repeats, bench.device)
        best = best_dense(contenders)
        before = [compared(one, best, layer_factor(bench.session.model)) for one in contenders]
        yield TtftLength(
            tokens=shape.tokens,
            segments=shape.segments,
            build_seconds=built,
            stored_bytes=bench.store.usage().num_bytes,
            best_dense="none" if best is None else best.name,
            rows=before,
        )


def best_dense(contenders: Sequence[Contender]) -> Contender | None:
    """The dense prefill, ours or a peer's, of the least median."""
    measured = [
        (one.spread.median, place)
        for place, one in enumerate(contenders)
        if one.kind != "setting" and one.spread is not None
    ]
    return contenders[min(measured)[1]] if measured else None


def compared(one: Contender, best: Contender | None, layers: float | None) -> TtftRow:
    """The record of a contender beside the best dense."""
    row = one.row()
    if row.seconds is None:
        return row
    median = row.seconds.median
    if layers is not None:
        row = msgspec.structs.replace(row, extrapolated_seconds=median * layers)
    if best is None or best.spread is None:
        return row
    speed_up = best.spread.median / median
    achieved = speed_up * one.work.flops_share if one.kind == "setting" and one.work else None
    return msgspec.structs.replace(row, speed_up=speed_up, achieved=achieved)
