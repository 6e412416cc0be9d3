"""Contenders at one length: warmed up alike, then run by turns."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

import torch

from redknot.bench.dense_peer import DensePeer
from redknot.bench.peers import peer_name
from redknot.bench.prompts import Request
from redknot.bench.records import Spread, TtftRow, Work
from redknot.bench.room import SHORT_OF_MEMORY, release
from redknot.bench.timed import Runner, Timed, run_peer

PEER_FAILS = (Exception,)  # libraries raise classes of their own; a rival's fault ends no run


@dataclass(slots=True, eq=False)
class Contender:
    """One way to the first token, and what was measured of it."""

    name: str
    kind: Literal["dense", "peer", "setting"]
    run: Callable[[Request], None]
    "Runs once and writes down here what it took."
    share: float | None = None
    seconds: list[float] = field(default_factory=list)
    "The first run first."
    stages: list[dict[str, float]] = field(default_factory=list)
    work: Work | None = None
    token: int | None = None
    failed: str | None = None

    @property
    def spread(self) -> Spread | None:
        """Of all runs but the first; None after a failure."""
        return None if self.failed or len(self.seconds) < 2 else Spread.of(self.seconds[1:])

    def row(self) -> TtftRow:
        """As a record, without what needs the others."""
        spread, names = self.spread, dict.fromkeys(name for run in self.stages for name in run)
        return TtftRow(
            name=self.name,
            kind=self.kind,
            share=self.share,
            skipped=self.failed,
            warm_up_seconds=self.seconds[0] if self.seconds else None,
            seconds=spread,
            work=self.work,
            stages={name: median(run.get(name, 0.0) for run in self.stages) for name in names}
            if spread
            else {},
            token=self.token,
        )


def of_runner(runner: Runner, matmul_rate: float) -> Contender:
    """Dense or a setting through the executor."""

    def run(request: Request) -> None:
        timed = runner.run(request)
        if contender.work is None:  # the same rows at each run; counted after the clock
            contender.work = work_of(timed, matmul_rate)
        else:
            contender.stages.append(timed.prefilled.seconds)
        contender.token = timed.token
        contender.seconds.append(timed.seconds)

    setting = runner.setting
    kind: Literal["dense", "setting"] = "dense" if setting.label == "dense" else "setting"
    contender = Contender(setting.label, kind, run, setting.share)
    return contender


def of_peer(name: str, peer: DensePeer, device: torch.device) -> Contender:
    """Dense through a library."""

    def run(request: Request) -> None:
        seconds, contender.token = run_peer(peer, request, device)
        contender.seconds.append(seconds)

    contender = Contender(peer_name(name), "peer", run)
    return contender


def work_of(timed: Timed, matmul_rate: float) -> Work:
    """Counted from the executed plan."""
    prefilled, decision = timed.prefilled, timed.decision
    total = prefilled.flops.total
    return Work(
        total,
        prefilled.flops_share,
        total / matmul_rate,
        prefilled.plan.policy,
        None if decision is None else decision.reason,
        prefilled.plan.cached_tokens,
    )


def compete(
    contenders: Sequence[Contender], request: Request, repeats: int, device: torch.device
) -> None:
    """Everyone once to warm up, then everyone in turn, ``repeats`` times."""
    for contender in _rounds(contenders, 1 + repeats):
        fails = PEER_FAILS if contender.kind == "peer" else SHORT_OF_MEMORY
        try:
            contender.run(request)
        except fails as error:
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            contender.failed = first
        if contender.failed:
            release(device)


def _rounds(contenders: Sequence[Contender], rounds: int) -> Iterator[Contender]:
    for _ in range(rounds):
        yield from (contender for contender in contenders if not contender.failed)
