"""One policy on one prompt, as a flat record: what reports are made of."""

from collections.abc import Callable, Sequence

import msgspec

from redknot.evaluation.fidelity import Fidelity
from redknot.evaluation.metrics import exact_match, f1


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one policy on one prompt; None is not measured."""

    id: str
    dataset: str
    policy: str
    tokens: int
    flops_share: float
    kv_share: float
    ttft: float | None = None
    transformers_ttft: float | None = None
    stages: dict[str, float] = {}
    kl: float | None = None
    agreement: float | None = None
    gold_nll_change: float | None = None
    top1: float | None = None
    top10: float | None = None
    answer: str | None = None
    f1: float | None = None
    exact_match: float | None = None

    def judged(
        self, found: Fidelity, golds: Sequence[str], decode: Callable[[Sequence[int]], str]
    ) -> "Record":
        """The same with fidelity, and with the first line of the answer scored if there is one."""
        record = msgspec.structs.replace(
            self,
            kl=found.kl,
            agreement=found.agreement,
            gold_nll_change=found.gold_nll_change,
            top1=found.top1,
            top10=found.top10,
        )
        if not found.answer:
            return record
        answer = decode(found.answer).strip().partition("\n")[0]
        return msgspec.structs.replace(
            record, answer=answer, f1=f1(answer, golds), exact_match=exact_match(answer, golds)
        )
