"""Reports as flat rows: what spreadsheets read and tables show."""

from collections.abc import Iterator, Mapping
from typing import Any

from redknot.bench.fidelity import NOT_MEASURED, Fidelity
from redknot.bench.records import (
    BreakdownReport,
    CapacityReport,
    DecodeReport,
    Spread,
    TrafficReport,
    TtftReport,
    TtftRow,
)

Flat = dict[str, Any]


def ttft_rows(report: TtftReport) -> Iterator[Flat]:
    """One for each length and contender."""
    for length in report.lengths:
        for row in length.rows:
            yield {
                "model": report.model,
                "tokens": length.tokens,
                "name": row.name,
                "kind": row.kind,
                "share": row.share,
                "skipped": row.skipped,
                **spread("seconds", row.seconds, "min", "max"),
                "extrapolated_seconds": row.extrapolated_seconds,
                "warm_up_seconds": row.warm_up_seconds,
                "speed_up": row.speed_up,
                "is_best_dense": row.name == length.best_dense,
                **_work(row),
                "achieved": row.achieved,
                "build_seconds": length.build_seconds,
                **{f"stage {name}": seconds for name, seconds in row.stages.items()},
                **_fidelity(row.fidelity),
            }


def breakdown_rows(report: BreakdownReport) -> Iterator[Flat]:
    """One for each setting and part, then its sum and its wall time."""
    for row in report.rows:
        common = {"model": report.model, "tokens": report.tokens, "name": row.name}
        for part in row.parts:
            yield common | {
                "part": part.name,
                "milliseconds": part.milliseconds,
                "share": part.share,
                "floor_milliseconds": part.floor_milliseconds,
            }
        yield common | {"part": "sum", "milliseconds": row.sum_milliseconds}
        yield common | {
            "part": "wall",
            "milliseconds": row.wall_milliseconds,
            "floor_milliseconds": row.work.floor_seconds * 1e3,
            **_fidelity(row.fidelity),
        }


def decode_rows(report: DecodeReport) -> Iterator[Flat]:
    """One for each batch size and setting."""
    for row in report.rows:
        yield {
            "model": report.model,
            "tokens": report.tokens,
            "batch": row.batch,
            "name": row.name,
            "share": row.share,
            "skipped": row.skipped,
            **spread("step_seconds", row.step_seconds, "p20", "p80"),
            "tokens_per_second": row.tokens_per_second,
            "extrapolated_step_seconds": row.extrapolated_step_seconds,
            "speed_up": row.speed_up,
            "kv_share": row.kv_share,
            "kv_bytes": row.kv_bytes,
            "first_steps_seconds": row.first_steps_seconds,
            **_fidelity(row.fidelity),
        }


def capacity_rows(report: CapacityReport) -> Iterator[Flat]:
    """One for each setting."""
    for row in report.rows:
        yield {
            "model": report.model,
            "tokens": report.tokens,
            "new_tokens": report.new_tokens,
            "name": row.name,
            "share": row.share,
            "skipped": row.skipped,
            "residents": row.residents,
            "residents_ratio": row.residents_ratio,
            "tokens_per_second": row.tokens_per_second,
            "tokens_per_second_ratio": row.tokens_per_second_ratio,
            **spread("step_seconds", row.step_seconds, "p20", "p80"),
            "extrapolated_step_seconds": row.extrapolated_step_seconds,
            "first_steps_seconds": row.first_steps_seconds,
            **spread("prefill_seconds", row.prefill_seconds, "min", "max"),
            "pages_each": row.pages_each,
            "pages_in_use": row.pages_in_use,
            "num_pages": report.num_pages,
            "peak_bytes": row.peak_bytes,
            "pages_left": row.pages_left,
            "stopped_by": row.stopped_by,
            **_fidelity(row.fidelity),
        }


def traffic_rows(report: TrafficReport) -> Iterator[Flat]:
    """One for each number of clients and setting."""
    for row in report.rows:
        yield {
            "model": report.model,
            "tokens": report.tokens,
            "new_tokens": report.new_tokens,
            "clients": row.clients,
            "name": row.name,
            "share": row.share,
            "skipped": row.skipped,
            "requests": row.requests,
            "seconds": row.seconds,
            "requests_per_second": row.requests_per_second,
            "tokens_per_second": row.tokens_per_second,
            "tokens_per_second_ratio": row.tokens_per_second_ratio,
            **spread("ttft_seconds", row.ttft_seconds, "p5", "p95"),
            "ttft_ratio": row.ttft_ratio,
            **spread("token_seconds", row.token_seconds, "p5", "p95"),
            "cached_share": row.cached_share,
            "preemptions": row.preemptions,
            **_fidelity(row.fidelity),
        }


def spread(name: str, found: Spread | None, low: str, high: str) -> Flat:
    """Median under ``name`` itself, then the others and how often it was measured."""
    names = (name, f"{name}_{low}", f"{name}_{high}", f"{name}_n")
    values = (None,) * 4 if found is None else (found.median, found.low, found.high, found.n)
    return dict(zip(names, values, strict=True))


def _work(row: TtftRow) -> Flat:
    if row.work is None:
        return {}
    work = row.work
    return {
        "flops": work.flops,
        "flops_share": work.flops_share,
        "floor_seconds": work.floor_seconds,
        "cached_tokens": work.cached_tokens,
        "ran": None if work.decision is None else work.policy,
    }


def _fidelity(found: Mapping[str, Fidelity | None]) -> Flat:
    flat: Flat = {}
    for model, one in found.items():
        match = None if one is None else one.exact_match
        flat[f"agreement, {model}"] = NOT_MEASURED if one is None else one.agreement.mean
        flat[f"exact match, {model}"] = NOT_MEASURED if match is None else match.mean
    return flat
