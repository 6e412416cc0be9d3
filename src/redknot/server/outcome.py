"""What stands in every kind of answer: usage, the report, and choices put together."""

import time
from dataclasses import dataclass, field
from typing import Any

from openai.types import CompletionUsage
from openai.types.completion_usage import PromptTokensDetails

from redknot.engine.messages import Report, TokenInfo
from redknot.server.answer import Answer, Update
from redknot.server.choice import Piece, Reason
from redknot.server.schema.common import Common
from redknot.server.tools import ToolCall


@dataclass(slots=True)
class Whole:
    """A choice put together."""

    text: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[tuple[int, TokenInfo]] = field(default_factory=list)
    reason: Reason = "stop"

    def add(self, piece: Piece) -> None:
        """Append a piece."""
        self.logprobs += piece.logprobs
        if isinstance(piece.content, ToolCall):
            self.calls.append(piece.content)
        else:
            self.text += piece.content


@dataclass(slots=True)
class Totals:
    """Counts over the jobs of one HTTP request."""

    prompt_tokens: int
    tokens: dict[tuple[int, int], int] = field(default_factory=dict)
    "Of each job and choice so far."
    reports: dict[int, Report] = field(default_factory=dict)
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def of(cls, answer: Answer) -> "Totals":
        """Nothing generated yet."""
        return cls(sum(len(job.request.token_ids) for job in answer.jobs))

    def add(self, job: int, update: Update) -> None:
        """Count what has come."""
        if isinstance(update, Report):
            self.reports[job] = update
        else:
            self.tokens[job, update.choice] = update.num_tokens

    @property
    def completion_tokens(self) -> int:
        """Of all choices so far."""
        return sum(self.tokens.values())

    def usage(self) -> CompletionUsage:
        """As OpenAI writes it."""
        cached = sum(report.cached_tokens for report in self.reports.values())
        return CompletionUsage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            total_tokens=self.prompt_tokens + self.completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
        )

    def so_far(self, body: Common) -> dict[str, Any]:
        """The usage until now, where every chunk is to tell it."""
        return {"usage": self.usage()} if body.wants_usage_always else {}

    def extra(self, body: Common) -> dict[str, Any]:
        """The `redknot` object, where it is wanted."""
        if body.redknot is None or not body.redknot.report:
            return {}
        reports = [_told(report) for _, report in sorted(self.reports.items())]
        return {"redknot": reports[0] if len(reports) == 1 else reports}


async def gather(answer: Answer, totals: Totals) -> dict[tuple[int, int], Whole]:
    """All choices of all jobs, once they are complete."""
    found: dict[tuple[int, int], Whole] = {}
    try:
        await answer.begin()
        async for job, update in answer.updates():
            totals.add(job, update)
            if isinstance(update, Report):
                continue
            whole = found.setdefault((job, update.choice), Whole())
            if isinstance(update, Piece):
                whole.add(update)
            else:
                whole.reason = update.reason
    finally:
        answer.close()
    return dict(sorted(found.items()))


def _told(report: Report) -> dict[str, Any]:
    return {
        "policy": report.policy,
        "decision": report.decision,
        "prompt_tokens": report.prompt_tokens,
        "cached_tokens": report.cached_tokens,
        "recomputed_tokens": report.recomputed_tokens,
        "flops_share": report.flops_share,
        "segments": [
            {
                "title": segment.title,
                "start": segment.start,
                "stop": segment.stop,
                "hit": segment.hit,
                "reason": segment.reason,
                "recomputed": segment.recomputed,
            }
            for segment in report.segments
        ],
        "seconds": report.seconds,
    }
