"""CPU: the torch backend at the embedded model's shapes beside dense SDPA."""

from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from redknot.kernels.attend import AttendPlan, Part, Reach, Rows, attend
from redknot.kernels.paging import PagedKV

from .bench import Bench, Case
from .check import Oracle
from .peers import Prefill
from .record import Record
from .setting import Setting

ROUNDS = 4
DENSE = "sdpa dense"


def setting(*, short: bool) -> Setting:
    """SmolLM2-135M: one of three KV heads global."""
    return Setting(
        device=torch.device("cpu"), dtype=torch.float32, num_query_heads=9, num_kv_heads=3, dim=64,
        page_size=64, lengths=(256, 512) if short else (4096, 8192),
        windows=(64,) if short else (256,),
    )  # fmt: skip


def run(bench: Bench) -> None:
    """All rows of prompts, from contiguous K/V and from pages."""
    model, window = bench.setting, bench.setting.windows[0]
    for tokens in model.lengths:
        p = model.prefill(tokens, window)
        reaches = model.reaches(window)
        plan = AttendPlan.of(Part(0, Rows.at(torch.arange(tokens), p.q.device), reaches))
        whole = PagedKV.dense(p.k, p.v)
        pages = model.in_pages(p.k, p.v, model.page_size)
        oracle = Oracle(p.q, whole, torch.arange(tokens), p.scale)
        everything = (Reach(),) * model.num_kv_heads
        cases = [
            _case("torch", "contiguous K/V", partial(_ours, p, whole, plan), oracle, reaches),
            _case("torch, pages", "pages in random order", partial(_ours, p, pages, plan),
                  oracle, reaches),
            _case(DENSE, "is_causal, enable_gqa", partial(_dense, p), oracle, everything),
        ]  # fmt: skip
        shape = f"tokens={tokens} window={window} page={model.page_size}"
        first = len(bench.records)
        bench.group("cpu", shape, cases, against=[DENSE], rounds=ROUNDS)
        for at, record in enumerate(bench.records[first:], first):
            bench.records[at] = _with_share(record, reaches, tokens)


def pairs_share(reaches: tuple[Reach, ...], tokens: int) -> float:
    """Visible pairs over those of dense causal attention."""
    at = torch.arange(tokens)
    dense = int((at + 1).sum())
    seen = 0
    for reach in reaches:
        behind = at + 1 if reach.window is None else (at + 1).clamp(max=reach.window)
        sinks = 0 if reach.window is None else (at + 1 - behind).clamp(max=reach.sink)
        seen += int((behind + sinks).sum())
    return seen / dense / len(reaches)


def _with_share(record: Record, reaches: tuple[Reach, ...], tokens: int) -> Record:
    if record.kind != "ours" or record.ratio is None:
        return record
    share = pairs_share(reaches, tokens)
    text = f"visible pairs 1/{1 / share:.3f}; speed-up over theirs: {share / record.ratio:.3f}"
    return replace(record, notes=f"{record.notes}; {text}")


def _case(name: str, notes: str, call: partial, oracle: Oracle, reaches: tuple[Reach, ...]) -> Case:
    return Case(
        impl=name,
        make=lambda: [call],
        check=lambda _, out: oracle.errors(out, reaches),
        kind="peer" if name == DENSE else "ours",
        notes=notes,
    )


def _ours(p: Prefill, kv: PagedKV, plan: AttendPlan) -> Tensor:
    out = attend(p.q, kv, plan, scale=p.scale, impl="torch")
    return out.unflatten(1, (len(p.q), -1)).transpose(0, 1)


def _dense(p: Prefill) -> Tensor:
    return F.scaled_dot_product_attention(
        p.q[None], p.k[None], p.v[None], is_causal=True, scale=p.scale, enable_gqa=True
    )[0]
