"""From the results of all prompts to a report."""

import platform
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version

import msgspec
import numpy as np
import torch

from redknot.evaluation.metrics import Interval, bootstrap, exact_match, f1
from redknot.evaluation.report import EvalReport, FirstToken, PolicyReport, Quantiles
from redknot.evaluation.run import PromptResult, Sample
from redknot.execution.session import Session


def summarise(
    session: Session,
    names: Sequence[str],
    results: Sequence[PromptResult],
    settings: dict[str, str],
) -> EvalReport:
    """Means and intervals over prompts; policies are paired with dense prompt by prompt."""
    golds = [result.row.answers for result in results]
    columns = [[result.samples[index] for result in results] for index in range(len(names))]
    peers = [result.transformers_ttft for result in results]
    dense = columns[names.index("dense")]
    floor = [result.floor for result in results if result.floor is not None]
    decode = session.tokeniser.decode
    return EvalReport(
        model=session.model.name,
        n=len(results),
        datasets=dict(Counter(result.row.dataset for result in results)),
        tokens=_quantiles([result.num_tokens for result in results]),
        settings=settings,
        environment=environment(session.model.adapter.device),
        floor=_policy("floor", floor, floor, golds, peers, decode) if floor else None,
        transformers_ttft_seconds=_quantiles([peer for peer in peers if peer is not None]),
        policies=[
            _policy(name, column, dense, golds, peers, decode)
            for name, column in zip(names, columns, strict=True)
        ],
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
        "redknot": version("redknot"),
    }


def prompt_records(
    session: Session, names: Sequence[str], results: Sequence[PromptResult]
) -> list[dict[str, object]]:
    """One record a prompt and policy, for paired analysis."""
    records: list[dict[str, object]] = []
    for result in results:
        for name, sample in zip(names, result.samples, strict=True):
            record: dict[str, object] = {
                "id": result.row.id,
                "dataset": result.row.dataset,
                "tokens": result.num_tokens,
                "policy": name,
                "flops_share": sample.flops_share,
                "ttft": sample.ttft,
                "transformers_ttft": result.transformers_ttft,
            }
            if sample.fidelity is not None:
                answer = _answer(sample, session.tokeniser.decode)
                record |= msgspec.to_builtins(sample.fidelity) | {
                    "answer": answer,
                    "exact_match": exact_match(answer, result.row.answers),
                    "f1": f1(answer, result.row.answers),
                }
            records.append(record)
    return records


def _policy(name, samples, dense, golds, peers, decode) -> PolicyReport:  # type: ignore[no-untyped-def]
    report = PolicyReport(
        name=name,
        flops_share=float(np.mean([sample.flops_share for sample in samples])),
        kv_share=float(np.mean([sample.kv_share for sample in samples])),
    )
    if samples[0].fidelity is not None:
        report = msgspec.structs.replace(report, **_fidelity(samples, dense, golds, decode))
    if samples[0].ttft is not None:
        report = msgspec.structs.replace(report, **_timing(samples, dense, peers))
    return report


def _fidelity(samples, dense, golds, decode) -> dict[str, object]:  # type: ignore[no-untyped-def]
    found = [sample.fidelity for sample in samples]
    answers = [_answer(sample, decode) for sample in samples]
    right = [exact_match(*pair) for pair in zip(answers, golds, strict=True)]
    base = [exact_match(_answer(s, decode), gold) for s, gold in zip(dense, golds, strict=True)]
    return {
        "kl": bootstrap([one.kl for one in found]),
        "agreement": bootstrap([one.agreement for one in found]),
        "gold_nll_change": bootstrap([one.gold_nll_change for one in found]),
        "first_token": FirstToken(
            float(np.mean([one.top1 for one in found])),
            float(np.mean([one.top10 for one in found])),
        ),
        "f1": bootstrap([f1(*pair) for pair in zip(answers, golds, strict=True)]),
        "exact_match": bootstrap(right),
        "exact_match_change": bootstrap(list(np.subtract(right, base))),
    }


def _timing(samples, dense, peers) -> dict[str, object]:  # type: ignore[no-untyped-def]
    spent = [sample.ttft for sample in samples]
    stages = {stage for sample in samples for stage in sample.stages}
    return {
        "ttft_seconds": _quantiles(spent),
        "ttft_ratio_to_dense": _ratio([sample.ttft for sample in dense], spent),
        "ttft_ratio_to_transformers": _ratio(peers, spent),
        "stages": {
            stage: float(np.median([sample.stages.get(stage, 0.0) for sample in samples]))
            for stage in sorted(stages)
        },
    }


def _ratio(above: Sequence[float], below: Sequence[float]) -> Interval:
    return bootstrap(list(np.divide(above, below)))


def _answer(sample: Sample, decode) -> str:  # type: ignore[no-untyped-def]
    if sample.fidelity is None:
        return ""
    return decode(sample.fidelity.answer).strip().partition("\n")[0]


def _quantiles(values: Sequence[float]) -> Quantiles | None:
    if not len(values):
        return None
    p10, median, p90 = np.percentile(values, [10, 50, 90])
    return Quantiles(float(median), float(p10), float(p90))
