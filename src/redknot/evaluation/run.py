"""Running every policy on the same prompts: fidelity, and time to first token."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from tqdm.auto import tqdm

from redknot.errors import InputError
from redknot.evaluation.data import Row, distractors, interleave, pad, trim
from redknot.evaluation.fidelity import Fidelity, Reference, fidelity, reference
from redknot.execution import ExecutionSettings, Executor, Prefilled
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
    timing: bool = True
    "Measure time to first token, of Transformers' own forward pass too."
    stored: bool = True
    "Whether all segments of a prompt are stored before it is measured; without, none is."
    planned: bool = False
    "Whether the planner may run dense instead of a policy."
    seed: str = "redknot"


@dataclass(slots=True)
class Sample:
    """One policy on one prompt."""

    flops_share: float
    kv_share: float
    fidelity: Fidelity | None = None
    ttft: float | None = None
    stages: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class PromptResult:
    """All policies on one prompt, in the order they were given."""

    row: Row
    num_tokens: int
    floor: Sample | None
    transformers_ttft: float | None
    samples: list[Sample]


def evaluate(
    session: Session,
    rows: Sequence[Row],
    policies: Sequence[Policy],
    head_map: HeadMap | None,
    settings: EvalSettings,
) -> list[PromptResult]:
    """Every policy, dense first, on the same token ids with the same warm-up.

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
    return [measure(row, prompt) for row, prompt in tqdm(prompts, desc="eval", unit="prompt")]


def prepare(
    session: Session, rows: Sequence[Row], settings: EvalSettings
) -> Iterator[tuple[Row, Prompt]]:
    """Prompts of the wanted length, taken from the data sets by turns."""
    pool = distractors(rows) if settings.pad_tokens else []
    taken = 0
    for index, row in enumerate(interleave(rows)):
        if taken == settings.limit:
            return
        if not row.answers or len(row.answers[0]) > settings.max_answer_chars:
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
        self.other_path = Executor(adapter, ExecutionSettings(row_block=208))

    def warm_up(self, prompt: Prompt) -> None:
        """Run everything once, so that no policy pays for the first use of anything."""
        self._build(prompt)
        self._transformers(prompt)
        if self.settings.planned:
            self.planner.rates  # noqa: B018 - calibrates
        for policy in self.policies:
            self._prefill(prompt, policy)

    def __call__(self, row: Row, prompt: Prompt) -> PromptResult:
        """All policies on ``prompt``."""
        self._build(prompt)
        settings, ref, floor = self.settings, None, None
        dense = self._prefill(prompt, Dense())
        if settings.fidelity:
            ref = self._reference(row, dense)
            floor = self._floor(prompt, ref)
        samples = []
        for policy in self.policies:
            prefilled = dense if policy == Dense() else self._prefill(prompt, policy)
            samples.append(self._sample(prefilled, ref))
        spent = self._transformers(prompt) if settings.timing else None
        return PromptResult(row, len(prompt), floor, spent, samples)

    def _build(self, prompt: Prompt) -> None:
        """Known state: all segments and what stands before them, or nothing."""
        if not self.settings.stored:
            self.session.forget()
            return
        self.session.build_missing(prompt)
        first = prompt.spans[0].start if prompt.spans else 0
        if self.session.look_up(prompt).layout.exact < first:
            self.session.prefill(prompt, Dense())

    def _prefill(self, prompt: Prompt, policy: Policy) -> Prefilled:
        room = 2 * self.settings.answer_tokens
        start = time.perf_counter()
        lookup = self.session.look_up(prompt)
        if self.settings.planned:
            policy = self.planner.decide(lookup.layout, policy, self.head_map).policy
        seconds = {"plan": time.perf_counter() - start}
        prefilled = self.session.prefill(prompt, policy, self.head_map, room=room, lookup=lookup)
        return replace(prefilled, seconds=seconds | prefilled.seconds)

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

    def _floor(self, prompt: Prompt, ref: Reference) -> Sample:
        lookup = self.session.look_up(prompt)
        room = 2 * self.settings.answer_tokens
        other = self.other_path.prefill(prompt.token_ids, lookup, Dense(), room=room)
        return Sample(1.0, 1.0, self._fidelity(other, ref))

    def _sample(self, prefilled: Prefilled, ref: Reference | None) -> Sample:
        return Sample(
            flops_share=prefilled.flops_share,
            kv_share=retained_share(len(prefilled.token_ids), list(prefilled.sight.decode)),
            fidelity=None if ref is None else self._fidelity(prefilled, ref),
            ttft=sum(prefilled.seconds.values()) if self.settings.timing else None,
            stages=prefilled.seconds,
        )

    def _fidelity(self, prefilled: Prefilled, ref: Reference) -> Fidelity:
        return fidelity(
            self.session.executor,
            prefilled,
            ref,
            self.session.model.end_token_ids,
            self.settings.answer_tokens,
        )

    @torch.inference_mode()
    def _transformers(self, prompt: Prompt) -> float:
        """Seconds of the model's own forward pass (SDPA) to the first token's id."""
        model = self.session.model
        ids = prompt.token_ids[None].to(model.adapter.device)
        start = time.perf_counter()
        int(model.hf(ids, use_cache=True, logits_to_keep=1).logits[0, -1].argmax())
        return time.perf_counter() - start
