"""Running every policy on the same prompts: fidelity, and time to first token."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import torch
from tqdm.auto import tqdm

from redknot.errors import InputError
from redknot.evaluation.data import Row, distractors, interleave, pad, trim
from redknot.evaluation.fidelity import Reference, fidelity, reference
from redknot.evaluation.record import Record
from redknot.evaluation.summary import FLOOR
from redknot.execution import ExecutionSettings, Executor, Prefilled
from redknot.execution.clock import Clock
from redknot.execution.planner import Planner
from redknot.execution.session import Session
from redknot.heads import HeadMap, retained_share
from redknot.recovery import Policy
from redknot.recovery.policies import Dense
from redknot.segments import Prompt

TOKENS_PER_WORD = 1.45  # of English prose and the embedded model's tokenizer, titles included


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalSettings:
    """What an evaluation measures and on which prompts."""

    limit: int | None = None
    "Most prompts."
    min_tokens: int = 1
    max_tokens: int = 7000
    pad_tokens: tuple[int, ...] = ()
    "Rows get distractors of the other rows up to one of these lengths, by turns."
    trim: bool = False
    "Rows lose documents down to that length too (for timing; the answer may go with them)."
    max_answer_chars: int = 80
    "Rows with a longer first answer are left out: sentences are no short answers."
    answer_tokens: int = 16
    "Most tokens of an answer, gold or generated."
    fidelity: bool = True
    "Measure distances from dense and answers."
    answers: bool = True
    "Let every policy write its own answer: F1 and exact match."
    timing: bool = True
    "Measure time to first token, of Transformers' own forward pass too."
    stored: bool = True
    "Whether all segments of a prompt are stored before it is measured; without, none is."
    floor_prompts: int | None = None
    "Prompts that dense is compared with itself on; all without a number."
    max_seconds: float | None = None
    "Stop after the prompt that passes this time; the report says how many were measured."
    planned: bool = False
    "Whether the planner may run dense instead of a policy."
    seed: str = "redknot"

    def __post_init__(self) -> None:
        if self.answer_tokens < 1 or self.min_tokens < 1:
            raise InputError("answer_tokens and min_tokens must be 1 or more")


def evaluate(
    session: Session,
    rows: Sequence[Row],
    policies: Sequence[Policy],
    head_map: HeadMap | None,
    settings: EvalSettings,
) -> Iterator[list[Record]]:
    """Every policy, dense first, on the same token ids with the same warm-up: records by prompt.

    Segments and the common prefix are built before a prompt is measured; `InputError` if no row
    gives a prompt of the wanted length.
    """
    prompts = list(prepare(session, rows, settings))
    if not prompts:
        raise InputError(
            f"no row gives a prompt of {settings.min_tokens} to {settings.max_tokens} tokens"
        )
    measure = _Measurement(session, policies, head_map, settings)
    if settings.timing:
        measure.warm_up(prompts[0][1])
    return _measured(measure, prompts, settings.max_seconds)


def _measured(
    measure: "_Measurement", prompts: Sequence[tuple[Row, Prompt]], max_seconds: float | None
) -> Iterator[list[Record]]:
    start = time.perf_counter()
    for row, prompt in tqdm(prompts, desc="eval", unit="prompt", disable=None):
        yield measure(row, prompt)
        if max_seconds and time.perf_counter() - start > max_seconds:
            return


def prepare(
    session: Session, rows: Sequence[Row], settings: EvalSettings
) -> Iterator[tuple[Row, Prompt]]:
    """Prompts of the wanted length, taken from the data sets by turns."""
    pool = distractors(rows) if settings.pad_tokens else []
    taken = 0
    for index, row in enumerate(interleave(rows)):
        if taken == settings.limit:
            return
        if len(row.answers[0]) > settings.max_answer_chars:
            continue
        if settings.pad_tokens:
            tokens = settings.pad_tokens[index % len(settings.pad_tokens)]
            words = int(tokens / TOKENS_PER_WORD)
            row = pad(row, pool, words, settings.seed)
            row = trim(row, words) if settings.trim else row
        prompt = session.tokeniser.prompt(row.as_documents(), row.question)
        room = 2 * settings.answer_tokens
        limit = min(settings.max_tokens, session.model.adapter.context_length - room)
        if settings.min_tokens <= len(prompt) <= limit:
            taken += 1
            yield row, prompt


class _Measurement:
    """Measures one prompt at a time."""

    def __init__(
        self,
        session: Session,
        policies: Sequence[Policy],
        head_map: HeadMap | None,
        settings: EvalSettings,
    ) -> None:
        self.session, self.head_map, self.settings = session, head_map, settings
        self.policies = policies
        adapter = session.model.adapter
        # Another kernel path: masked blocks of an odd size instead of the fused causal call.
        self.planner = Planner(session.executor)
        self._measured = 0
        self._beginning: Prefilled | None = None
        self.other_path = Executor(adapter, ExecutionSettings(row_block=208))

    def warm_up(self, prompt: Prompt) -> None:
        """Run everything once, so that no policy pays for the first use of anything."""
        self._build(prompt)
        self._transformers(prompt)
        if self.settings.planned:
            self.planner.calibrate()
        for policy in self.policies:
            self._prefill(prompt, policy)

    def __call__(self, row: Row, prompt: Prompt) -> list[Record]:
        """All policies on ``prompt``, and the floor."""
        self._build(prompt)
        dense = self._prefill(prompt, Dense())
        ref = self._reference(row, dense) if self.settings.fidelity else None
        records = []
        self._measured += 1
        limit = self.settings.floor_prompts
        if ref is not None and (limit is None or self._measured <= limit):
            other = self._other(prompt)
            records.append(self._judged(self._record(row, FLOOR, other), row, other, ref))
        for policy in self.policies:
            prefilled = dense if policy == Dense() else self._prefill(prompt, policy)
            record = self._record(row, policy.describe(), prefilled)
            records.append(record if ref is None else self._judged(record, row, prefilled, ref))
        if self.settings.timing:
            spent = self._transformers(prompt)
            records = [
                msgspec.structs.replace(record, transformers_ttft=spent) for record in records
            ]
        return records

    def _build(self, prompt: Prompt) -> None:
        """Known state: all segments and what stands before them, or nothing."""
        self.session.forget(segments=not self.settings.stored)
        self._beginning = None
        if not self.settings.stored:
            return
        self.session.build_missing(prompt)
        if prompt.spans and prompt.spans[0].start:
            first = Prompt(prompt.token_ids[: prompt.spans[0].start], (), (0, 1))
            self._beginning = self.session.prefill(first, Dense())

    def _prefill(self, prompt: Prompt, policy: Policy) -> Prefilled:
        """One policy; it finds what `_build` left, and nothing that another policy has added."""
        room = 2 * self.settings.answer_tokens
        self.session.forget(segments=False)
        if self._beginning is not None:
            self.session.remember(self._beginning, len(self._beginning.token_ids))
        clock = Clock(self.session.model.adapter.device)
        lookup = self.session.look_up(prompt)
        clock.mark("lookup")
        if self.settings.planned:
            policy = self.planner.decide(lookup.layout, policy, self.head_map).policy
            clock.mark("plan")
        return self.session.prefill(
            prompt, policy, self.head_map, room=room, lookup=lookup, clock=clock
        )

    def _reference(self, row: Row, dense: Prefilled) -> Reference:
        tokenizer = self.session.model.tokenizer
        gold = tokenizer(" " + row.answers[0].strip(), add_special_tokens=False).input_ids
        return reference(
            self.session.executor,
            dense,
            torch.tensor(gold[: self.settings.answer_tokens]),
            self.session.model.end_token_ids,
            self.settings.answer_tokens,
        )

    def _other(self, prompt: Prompt) -> Prefilled:
        """Dense through another kernel path."""
        lookup = self.session.look_up(prompt)
        return self.other_path.prefill(prompt.token_ids, lookup, Dense())

    def _record(self, row: Row, name: str, prefilled: Prefilled) -> Record:
        timed = self.settings.timing and name != FLOOR
        return Record(
            id=row.id,
            dataset=row.dataset,
            policy=name,
            tokens=len(prefilled.token_ids),
            flops_share=prefilled.flops_share,
            kv_share=retained_share(len(prefilled.token_ids), list(prefilled.sight.decode)),
            ttft=sum(prefilled.seconds.values()) if timed else None,
            stages=prefilled.seconds if timed else {},
        )

    def _judged(self, record: Record, row: Row, prefilled: Prefilled, ref: Reference) -> Record:
        found = fidelity(
            self.session.executor,
            prefilled,
            ref,
            self.session.model.end_token_ids,
            self.settings.answer_tokens if self.settings.answers else 0,
        )
        return record.judged(found, row.answers, self.session.tokeniser.decode)

    @torch.inference_mode()
    def _transformers(self, prompt: Prompt) -> float:
        """Seconds of the model's own forward pass (SDPA) to the first token's id."""
        model = self.session.model
        ids = prompt.token_ids[None].to(model.adapter.device)
        start = time.perf_counter()
        int(model.hf(ids, use_cache=True, logits_to_keep=1).logits[0, -1].argmax())
        return time.perf_counter() - start
