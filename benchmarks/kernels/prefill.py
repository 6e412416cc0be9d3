"""Prefill: all rows of a prompt, rows gathered at random, and the article's dense + mask."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from redknot.kernels.attend import AttendPlan, Part, Reach, Rows, attend, flash
from redknot.kernels.paging import PagedKV

from . import peers, peers_fa4
from .bench import Bench, Case
from .check import Oracle
from .peers import Call, Prefill
from .record import Record
from .setting import Setting

TWO_CALLS = ("fa3_calls", "fa4_calls")
DENSE = ("fa3_dense", "fa4_dense", "cudnn_dense")
BACKENDS = ("flash fa3", "flash fa4", "triton")
SPEEDUP_CLAIMED = 23.3
MS_CLAIMED = 5420.0
LAYERS_CLAIMED, TOKENS_CLAIMED = 64, 131072


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """One prompt as peers and as our kernels take it."""

    setting: Setting
    p: Prefill
    kv: PagedKV
    window: int
    oracle: Oracle

    @classmethod
    def of(cls, setting: Setting, tokens: int, window: int, page_size: int) -> "Inputs":
        """Random ones."""
        p = setting.prefill(tokens, window)
        kv = setting.in_pages(p.k, p.v, page_size)
        return cls(setting, p, kv, window, Oracle(p.q, kv, torch.arange(tokens), p.scale))

    @property
    def tokens(self) -> int:
        """Length of the prompt."""
        return self.p.k.shape[1]

    def ours(self, backend: str, query: Tensor, positions: Tensor) -> Call:
        """Attention from the page pool, sinks included: [query_head, row, dim]."""
        rows = Rows.at(positions, query.device)
        plan = AttendPlan.of(Part(0, rows, self.setting.reaches(self.window)))
        if backend == "flash fa3":
            peers.fa3_ops()
            run = partial(flash.attend, forward=flash.fa3)
        elif backend == "flash fa4":
            peers_fa4.interface()
            run = partial(flash.attend, forward=flash.fa4)
        else:
            run = partial(attend, impl=backend)

        def call() -> Tensor:
            out = run(query, self.kv, plan, scale=self.p.scale)
            out = out[0] if isinstance(out, tuple) else out
            return out.unflatten(1, (len(query), -1)).transpose(0, 1)

        return call

    def case(self, backend: str) -> Case:
        """Ours over all rows."""
        reaches = self.setting.reaches(self.window)
        return Case(
            impl=backend,
            make=lambda: [self.ours(backend, self.p.q, torch.arange(self.tokens))],
            check=lambda _, out: self.oracle.errors(out, reaches),
            kind="ours",
        )

    def peer(self, name: str, make: Callable[[Prefill], Call], sees: peers.Sees) -> Case:
        """A rival over all rows."""
        seen = self.p.seen(sees)
        reaches = tuple(Reach() if w is None else Reach(w, seen.sink) for w in seen.windows)
        return Case(
            impl=name,
            make=lambda: [make(self.p)],
            check=lambda _, out: self.oracle.errors(out, reaches),
        )


def run(bench: Bench) -> None:
    """All rows, at every length and window; other page sizes at one length."""
    setting = bench.setting
    for tokens in sorted(setting.lengths, key=lambda length: length != 32768):
        for window in setting.windows:
            inputs = Inputs.of(setting, tokens, window, setting.page_size)
            shape = f"tokens={tokens} window={window} page={setting.page_size}"
            dense = window == setting.windows[0]  # the same for every window
            cases = [*_peers(inputs, dense=dense), *map(inputs.case, BACKENDS)]
            bench.group("prefill", shape, cases, against=TWO_CALLS)
            if tokens <= setting.graph_tokens:
                cases = [case for case in cases if case.impl in (*TWO_CALLS, *BACKENDS)]
                bench.group("prefill graph", shape, cases, against=TWO_CALLS, launches=4)
    for tokens, page_size in setting.other_pages:
        window = setting.windows[0]
        inputs = Inputs.of(setting, tokens, window, page_size)
        cases = [c for c in _peers(inputs, dense=False) if c.impl in TWO_CALLS]
        cases += map(inputs.case, BACKENDS)
        shape = f"tokens={tokens} window={window} page={page_size}"
        bench.group("prefill", shape, cases, against=TWO_CALLS)


def run_gathered(bench: Bench) -> None:
    """A quarter of the rows, at random, beside all rows."""
    setting = bench.setting
    for tokens in setting.gathered:
        window = setting.windows[0]
        inputs = Inputs.of(setting, tokens, window, setting.page_size)
        positions = torch.randperm(tokens)[: tokens // 4].sort().values
        query = setting.random(len(positions), setting.num_query_heads, setting.dim).transpose(0, 1)
        oracle = Oracle(query, inputs.kv, positions, setting.scale)
        reaches = setting.reaches(window)
        gathered = [
            Case(
                impl=f"{backend} gathered",
                make=partial(_list, inputs.ours, backend, query, positions),
                check=lambda _, out, oracle=oracle, seen=reaches: oracle.errors(out, seen),
                kind="ours",
            )
            for backend in BACKENDS
        ]
        shape = f"tokens={tokens} window={window} page={setting.page_size} rows={len(positions)}"
        cases = [*gathered, *map(inputs.case, BACKENDS)]
        bench.group("gathered", shape, cases, against=BACKENDS)


def run_article(bench: Bench) -> None:
    """Dense attention under an explicit mask against ours, where a mask can be had."""
    setting = bench.setting
    window, ratios = setting.windows[0], {}
    for tokens in setting.article:
        inputs = Inputs.of(setting, tokens, window, setting.page_size)
        masked = partial(peers.sdpa_masked, max_rows=setting.mask_tokens)
        cases = [inputs.peer("sdpa_masked", masked, "sinks"), *map(inputs.case, BACKENDS)]
        shape = f"tokens={tokens} window={window} page={setting.page_size}"
        found = bench.group("article", shape, cases, against=BACKENDS)
        masked_record = next(r for r in found if r.impl == "sdpa_masked")
        if masked_record.ratio is not None:
            ratios[tokens] = masked_record
    if ratios:
        bench.add(_extrapolated(bench, ratios[max(ratios)], max(ratios), window))


def _extrapolated(bench: Bench, masked: Record, tokens: int, window: int) -> Record:
    """What the claim's length would take: nobody can hold its mask beside the layer."""
    longest = f"tokens={TOKENS_CLAIMED} window={window} page={bench.setting.page_size}"
    ours = [r for r in bench.records if (r.op, r.shape) == ("prefill", longest) and r.usable]
    ours = [r.median_us for r in ours if r.impl in BACKENDS]
    median = masked.median_us * (TOKENS_CLAIMED / tokens) ** 2
    notes = (
        f"square law from {tokens}; not run: one [{TOKENS_CLAIMED}, {TOKENS_CLAIMED}] bool mask"
        f" takes {TOKENS_CLAIMED**2 / 2**30:.0f} GiB, so nobody runs it"
    )
    matmul = bench.ceiling("matmul")
    if matmul is not None:
        setting = bench.setting
        flops = 2 * setting.num_query_heads * setting.dim * TOKENS_CLAIMED**2 * LAYERS_CLAIMED
        floor = flops / matmul.tflop_per_s / 1e9
        notes += (
            f"; the article's {MS_CLAIMED / 1e3} s for {LAYERS_CLAIMED} layers against a compute"
            f" floor of {floor / 1e3:.1f} s for dense causal attention of this shape"
        )
    return Record(
        op="article", shape=longest, impl="sdpa_masked", kind="extrapolated", median_us=median,
        ratio=median / min(ours) if ours else None, ratio_to="ours" if ours else "", notes=notes,
    )  # fmt: skip


def _peers(inputs: Inputs, *, dense: bool) -> Iterator[Case]:
    for name, (make, sees) in {**peers.PREFILL, **peers_fa4.PREFILL}.items():
        if inputs.setting.tiny and name != "sdpa_masked":
            continue
        if sees == "dense" and not dense:
            continue
        if name == "sdpa_masked" and inputs.tokens > inputs.setting.mask_tokens:
            continue
        case = inputs.peer(name, make, sees)
        if sees == "dense":
            case = replace(case, flops=2 * inputs.p.q.numel() * inputs.tokens)
        yield case


def _list(make: Callable[..., Call], *args: object) -> list[Call]:
    return [make(*args)]
