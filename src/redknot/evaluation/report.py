"""What an evaluation found: the record that is written as JSON, and its table."""

import msgspec
from rich.table import Table

from redknot.evaluation.metrics import Interval


class Quantiles(msgspec.Struct, frozen=True):
    """Seconds over prompts."""

    median: float
    p10: float
    p90: float


class FirstToken(msgspec.Struct, frozen=True):
    """How the first token compares with dense's."""

    top1: float
    top10: float


class PolicyReport(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One policy over all prompts."""

    name: str
    flops_share: float
    kv_share: float
    "Share of the prompt's K/V that decoding keeps."
    kl: Interval | None = None
    agreement: Interval | None = None
    gold_nll_change: Interval | None = None
    first_token: FirstToken | None = None
    f1: Interval | None = None
    exact_match: Interval | None = None
    exact_match_change: Interval | None = None
    ttft_seconds: Quantiles | None = None
    ttft_ratio_to_dense: Interval | None = None
    "Dense's time over the policy's, paired by prompt: above 1 is faster."
    ttft_ratio_to_transformers: Interval | None = None
    "The time of Transformers' SDPA prefill over the policy's, paired by prompt."
    stages: dict[str, float] | None = None
    "Median seconds by stage."


class EvalReport(msgspec.Struct, frozen=True, kw_only=True):
    """An evaluation of one model."""

    model: str
    n: int
    datasets: dict[str, int]
    tokens: Quantiles | None
    "Of the prompts."
    settings: dict[str, str]
    environment: dict[str, str]
    floor: PolicyReport | None
    "Dense against itself through another kernel path."
    transformers_ttft_seconds: Quantiles | None
    policies: list[PolicyReport]


def as_table(report: EvalReport) -> Table:
    """The figures that people compare, a row for each policy."""
    table = Table(title=f"{report.model}, {report.n} prompts")
    heads = ("policy", "FLOPs", "KL", "agreement", "gold NLL", "EM", "TTFT s", "vs dense", "KV")
    for head in heads:
        table.add_column(head, justify="left" if head == "policy" else "right")
    for policy in report.policies:
        table.add_row(
            policy.name,
            f"{policy.flops_share:.3f}",
            _show(policy.kl),
            _show(policy.agreement),
            _show(policy.gold_nll_change, sign=True),
            _show(policy.exact_match),
            "" if policy.ttft_seconds is None else f"{policy.ttft_seconds.median:.2f}",
            _show(policy.ttft_ratio_to_dense),
            f"{policy.kv_share:.2f}",
        )
    if report.floor is not None:
        floor = report.floor
        table.add_section()
        table.add_row(
            "floor",
            "",
            _show(floor.kl),
            _show(floor.agreement),
            _show(floor.gold_nll_change, sign=True),
        )
    return table


def _show(interval: Interval | None, *, sign: bool = False) -> str:
    if interval is None:
        return ""
    plus = "+" if sign else ""
    return f"{interval.mean:{plus}.3f} [{interval.low:{plus}.3f},{interval.high:{plus}.3f}]"
