"""An engine in this process over a tiny model: submit, take turns, look at what came."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tests.execution.eager import lively_hf, rounding
from tests.tiny import random_ids
from transformers import PreTrainedModel

from redknot.engine.config import EngineConfig
from redknot.engine.messages import (
    Ended,
    Output,
    Refused,
    Report,
    SamplingSpec,
    SpanHint,
    Submit,
    TokenInfo,
)
from redknot.engine.setup import build_engine
from redknot.execution import ExecutionSettings
from redknot.execution.session import Session
from redknot.heads import HeadMap
from redknot.models.byte_tokenizer import byte_tokenizer
from redknot.models.loading import wrap_model
from redknot.recovery import Policy
from redknot.recovery.policies import parse_policy
from redknot.segments import MemoryStore, Prompt

ROWS = 8
"(layer, group) pairs of the llama model: pages that each 16 tokens take."


@dataclass
class Answer:
    """Everything that was said about one request; it refuses what may not follow what."""

    choices: int
    report: Report | None = None
    tokens: dict[int, list[TokenInfo]] = field(default_factory=dict)
    ended: dict[int, Ended] = field(default_factory=dict)
    first_turn: int = -1

    def ids(self, choice: int = 0) -> list[int]:
        return [token.token_id for token in self.tokens.get(choice, [])]

    @property
    def all_ids(self) -> list[list[int]]:
        return [self.ids(choice) for choice in range(self.choices)]

    @property
    def reasons(self) -> list[str]:
        return [self.ended[choice].reason for choice in sorted(self.ended)]

    @property
    def told(self) -> Report:
        assert self.report is not None
        return self.report

    @property
    def done(self) -> bool:
        return len(self.ended) == self.choices


class World:
    """One engine, its clients, and pages that add up after every turn."""

    def __init__(
        self,
        *,
        hf: PreTrainedModel | None = None,
        policy: str | Policy = "dense",
        head_map: HeadMap | None = None,
        num_pages: int = 4000,
        chunk_tokens: int | None = 64,
        store: MemoryStore | None = None,
        tokenizer: Any = None,
        **config: Any,
    ) -> None:
        self.hf = lively_hf() if hf is None else hf
        model = wrap_model(self.hf, tokenizer or byte_tokenizer(add_bos=True), "tiny")
        settings = ExecutionSettings(num_pages=num_pages, chunk_tokens=chunk_tokens, page_size=16)
        self.session = Session(model, store=store or MemoryStore(), settings=settings)
        plain: dict[str, Any] = {"planned": False, "build_idle": False, "max_requests": 8}
        chosen = parse_policy(policy) if isinstance(policy, str) else policy
        self.engine = build_engine(EngineConfig(**(plain | config)), self.session, chosen, head_map)
        self.pool = self.session.executor.storage.pool
        self.answers: dict[str, Answer] = {}
        self.turns = 0
        self._clock = 0.0

    def offer(self, prompt: Prompt, *, name: str = "", **options: Any) -> Refused | str:
        """Submit; the request's id, or why it was refused."""
        submit = self.message(prompt, name=name or f"r{len(self.answers)}", **options)
        refusal = self.engine.submit(submit)
        if refusal is not None:
            return refusal
        self.answers[submit.request_id] = Answer(submit.sampling.n)
        return submit.request_id

    def message(
        self,
        prompt: Prompt,
        *,
        name: str,
        policy: str | None = None,
        exact: bool = False,
        salt: str = "",
        arrived: float | None = None,
        max_tokens: int = 8,
        ignore_eos: bool = True,
        **sampling: Any,
    ) -> Submit:
        """As the server would write it; each arrives after the one before."""
        self._clock += 1.0
        return Submit(
            request_id=name,
            token_ids=prompt.token_ids.tolist(),
            spans=tuple(SpanHint(start=span.start, stop=span.stop) for span in prompt.spans),
            probe=prompt.probe,
            policy=policy,
            exact=exact,
            salt=salt,
            arrived=self._clock if arrived is None else arrived,
            sampling=SamplingSpec(max_tokens=max_tokens, ignore_eos=ignore_eos, **sampling),
        )

    def submit(self, prompt: Prompt, **options: Any) -> str:
        """Submit what must be taken."""
        got = self.offer(prompt, **options)
        assert isinstance(got, str), got
        return got

    def turn(self) -> None:
        """One turn; what it says is in order, and pages add up after it."""
        self.turns += 1
        output = self.engine.turn()
        self.engine.check()
        if output is not None:
            self._take(output)

    def run(self, most: int = 3000) -> None:
        """Until no request or task is left; one turn at least, which says what was cancelled."""
        for _ in range(most):
            self.turn()
            if not self.engine.scheduler.jobs:
                return
        raise AssertionError(f"still {list(self.engine.scheduler.jobs)} after {most} turns")

    def settle(self, most: int = 3000) -> None:
        """Until nothing is to do, idle building included."""
        self.run(most)
        for _ in range(most):
            if self.engine.is_idle:
                return
            self.turn()
        raise AssertionError("never idle")

    def ask(self, prompt: Prompt, **options: Any) -> Answer:
        """Submit one request and wait for its end."""
        request_id = self.submit(prompt, **options)
        self.run()
        return self.answers[request_id]

    def build(self, *segments: torch.Tensor) -> None:
        """Put their state into the store."""
        for ids in segments:
            self.session.build(ids)

    def count(self, name: str) -> float:
        return self.engine.counters.snapshot()[name]

    @property
    def hit_tokens(self) -> float:
        """Of all tiers."""
        counts = self.engine.counters.snapshot()
        return sum(value for name, value in counts.items() if name.startswith("hit_tokens."))

    def assert_empty(self) -> None:
        """Nobody holds pages but beginnings, and the idle slots one."""
        assert not self.engine.requests
        assert not self.engine.scheduler.jobs
        self.engine.check()
        self.session.beginnings.forget()
        assert self.pool.num_used == 1

    def _take(self, output: Output) -> None:
        for told in output.prefilled:
            answer = self.answers[told.request_id]
            assert answer.report is None, "one report for each request"
            answer.report, answer.first_turn = told.report, self.turns
        for made in output.produced:
            answer = self.answers[made.request_id]
            assert answer.report is not None, "tokens before the report"
            assert made.choice not in answer.ended, "tokens after the end"
            answer.tokens.setdefault(made.choice, []).extend(made.tokens)
        for end in output.ended:
            answer = self.answers[end.request_id]
            assert end.choice not in answer.ended, "two ends"
            answer.ended[end.choice] = end


def segments(*lengths: int, seed: int = 0) -> list[torch.Tensor]:
    """Random texts."""
    return [random_ids(length, 1000 * seed + 17 + index) for index, length in enumerate(lengths)]


def prompt_of(
    *parts: torch.Tensor, lead: int = 0, question: int = 12, first: bool = False
) -> Prompt:
    """BOS, ``lead`` tokens that only this ``lead`` has, documents, and a question (or before)."""
    asked = random_ids(question, 99 + 31 * lead).tolist()
    ids = [256, *[(lead + index) % 256 for index in range(7)]]
    start = len(ids)
    ids += asked if first else []
    spans = []
    for part in parts:
        spans.append((len(ids), len(ids) + len(part)))
        ids += part.tolist()
    probe = (start, start + question) if first else (len(ids), len(ids) + question)
    return Prompt.of_ids(ids + ([] if first else asked), spans, probe)


def assert_same(
    hf: PreTrainedModel, prompt: Prompt, got: Sequence[TokenInfo], wanted: Sequence[TokenInfo]
) -> None:
    """Equal tokens, and log-probabilities as near as rounding allows.

    Tokens may part where the two likeliest (two alternatives are told) lie closer together than
    both sides may be off.
    """
    ids = torch.cat([prompt.token_ids, torch.tensor([token.token_id for token in wanted])])
    with torch.inference_mode():
        scale = float(hf(ids[None]).logits.abs().max())
    bound = 4 * rounding(hf, len(ids)) * scale  # a logit and the sum, of either side
    assert len(got) == len(wanted)
    for index, (one, other) in enumerate(zip(got, wanted, strict=True)):
        if one.token_id != other.token_id:
            (_, best), (_, second) = other.top[:2]
            assert best - second <= bound, f"token {index} differs"
            return
        assert one.logprob is not None
        assert other.logprob is not None
        assert abs(one.logprob - other.logprob) <= bound, f"token {index} is as likely"
