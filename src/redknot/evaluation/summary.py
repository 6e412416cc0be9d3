"""From the records of all prompts to a report."""

import platform
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version

import msgspec
import numpy as np
import torch

from redknot.evaluation.metrics import Interval, bootstrap
from redknot.evaluation.record import Record
from redknot.evaluation.report import EvalReport, FirstToken, PolicyReport, Quantiles
from redknot.version import __version__

FLOOR = "floor"


def summarise(
    model: str, records: Sequence[Record], settings: dict[str, str], environment: dict[str, str]
) -> EvalReport:
    """Means and intervals over prompts; policies are paired with dense prompt by prompt."""
    by_policy: dict[str, list[Record]] = {}
    for record in records:
        by_policy.setdefault(record.policy, []).append(record)
    dense = by_policy["dense"]
    floor = by_policy.pop(FLOOR, None)
    return EvalReport(
        model=model,
        n=len(dense),
        datasets=dict(Counter(record.dataset for record in dense)),
        tokens=_quantiles([float(record.tokens) for record in dense]),
        settings=settings,
        environment=environment,
        floor=None if floor is None else _policy(FLOOR, floor, dense),
        transformers_ttft_seconds=_quantiles(_known(dense, "transformers_ttft")),
        policies=[_policy(name, found, dense) for name, found in by_policy.items()],
    )


def environment(device: torch.device) -> dict[str, str]:
    """Machine and versions, for whoever compares figures."""
    gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if gpu else platform.processor() or "cpu",
        "threads": str(torch.get_num_threads()),
        "torch": str(torch.__version__),
        "transformers": version("transformers"),
        "python": platform.python_version(),
        "redknot": __version__,
    }


def _policy(name: str, found: Sequence[Record], dense: Sequence[Record]) -> PolicyReport:
    report = PolicyReport(
        name=name,
        flops_share=float(np.mean([record.flops_share for record in found])),
        kv_share=float(np.mean([record.kv_share for record in found])),
    )
    if found[0].kl is not None:
        report = msgspec.structs.replace(
            report,
            kl=_interval(found, "kl"),
            agreement=_interval(found, "agreement"),
            gold_nll_change=_interval(found, "gold_nll_change"),
            first_token=FirstToken(
                float(np.mean(_known(found, "top1"))), float(np.mean(_known(found, "top10")))
            ),
        )
    if found[0].exact_match is not None:
        own = _known(dense, "exact_match")[: len(found)]  # the floor may cover fewer prompts
        change = np.subtract(_known(found, "exact_match"), own)
        report = msgspec.structs.replace(
            report,
            f1=_interval(found, "f1"),
            exact_match=_interval(found, "exact_match"),
            exact_match_change=bootstrap(change.tolist()),
        )
    if found[0].ttft is not None:
        report = _with_timing(report, found, dense)
    return report


def _with_timing(
    report: PolicyReport, found: Sequence[Record], dense: Sequence[Record]
) -> PolicyReport:
    spent = _known(found, "ttft")
    stages = sorted({stage for record in found for stage in record.stages})
    return msgspec.structs.replace(
        report,
        ttft_seconds=_quantiles(spent),
        ttft_ratio_to_dense=bootstrap(np.divide(_known(dense, "ttft"), spent).tolist()),
        ttft_ratio_to_transformers=bootstrap(
            np.divide(_known(dense, "transformers_ttft"), spent).tolist()
        ),
        stages={
            stage: float(np.median([record.stages.get(stage, 0.0) for record in found]))
            for stage in stages
        },
    )


def _known(records: Sequence[Record], field: str) -> list[float]:
    values = [getattr(record, field) for record in records]
    return [value for value in values if value is not None]


def _interval(records: Sequence[Record], field: str) -> Interval:
    return bootstrap(_known(records, field))


def _quantiles(values: Sequence[float]) -> Quantiles | None:
    if not values:
        return None
    p10, median, p90 = np.percentile(values, [10, 50, 90])
    return Quantiles(float(median), float(p10), float(p90))
