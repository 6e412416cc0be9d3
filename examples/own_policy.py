"""A policy of one's own: recompute the last tokens of every segment."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from redknot import LLM, Document, Policy, Stage


@dataclass(frozen=True, kw_only=True)
class Tails(Policy):
    """The last ``k`` tokens of each stored segment."""

    k: int = 32

    name: ClassVar = "tails"

    def keep(self, stage: Stage) -> Tensor:
        """Decided at the first layer; later layers change nothing."""
        if stage.layer:
            return stage.active
        mask = stage.layout.reusable.clone()
        for start, stop in stage.layout.segments:
            mask[start : max(start, stop - self.k)] = False
        return mask.nonzero().flatten()


llm = LLM("embedded", planned=False)
documents = [Document("The ferry is called the Grey Wagtail. " * 8, "Ferry")]
for row in llm.compare(documents, "What is the ferry called?", [Tails(k=16), "question_drop"]):
    print(f"{row.policy:14s} {row.flops_share:.2f} of dense, agreement {row.agreement:.2f}")
