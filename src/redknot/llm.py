"""The library: a model that answers over documents and reuses their state."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redknot.errors import InputError
from redknot.evaluation.compare import Comparison, compare
from redknot.execution import ExecutionSettings, Prefilled
from redknot.execution.clock import Clock
from redknot.execution.generate import decode
from redknot.execution.planner import Decision, Planner
from redknot.execution.sampling import Sampling
from redknot.execution.session import Known, Session
from redknot.heads import HeadMap
from redknot.heads.shipped import shipped_map
from redknot.models import LoadedModel, load_model
from redknot.models.loading import LoadOptions
from redknot.models.text import TextWriter
from redknot.recovery import Plan, Policy
from redknot.recovery.policies import QuestionDrop, parse_policy
from redknot.segments import Document, Lookup, MemoryStore, Prompt, PromptTemplate, SegmentStore
from redknot.segments.lookup import Outcome


@dataclass(frozen=True, slots=True)
class ReuseReport:
    """What of a prompt was reused, and why the rest was not."""

    prompt_tokens: int
    reused_tokens: int
    "Tokens of which at least one layer kept stored state."
    cached_tokens: int
    "Floor of the sum over tokens of the share of layers not computed: work really saved."
    segments: tuple[Outcome, ...]


@dataclass(frozen=True, slots=True)
class Generation:
    """An answer and how it came about."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    "stop or length."
    policy: str
    "What ran."
    decision: str
    "Why it ran."
    flops_share: float
    ttft: float
    "Seconds from token ids to the first token's id."
    seconds: dict[str, float]
    "By stage; `decode` is what follows the first token, `build` what was stored afterwards."
    reuse: ReuseReport
    plan: Plan
    "The rows of every layer, as executed."


@dataclass(frozen=True, slots=True)
class Segment:
    """A stored text."""

    key: str
    num_tokens: int
    num_bytes: int
    seconds: float
    "Spent on building; near zero if it was there."


class Stream:
    """Pieces of an answer as they come; `result` is there once all have been taken."""

    def __init__(self, pieces: Iterator[str | Generation]) -> None:
        self._pieces = pieces
        self.result: Generation | None = None

    def __iter__(self) -> Iterator[str]:
        for piece in self._pieces:
            if isinstance(piece, Generation):
                self.result = piece
            else:
                yield piece


class LLM:
    """A loaded model, its head map, its policy and its store. One request at a time."""

    def __init__(
        self,
        model: str | Path | LoadedModel = "embedded",
        *,
        head_map: HeadMap | str | Path | None = "auto",
        policy: Policy | str | None = None,
        template: PromptTemplate = PromptTemplate(),
        store: SegmentStore | None = None,
        settings: ExecutionSettings = ExecutionSettings(),
        salt: str = "",
        planned: bool = True,
        **load: Any,
    ) -> None:
        """Open ``model``; ``load`` takes the fields of `LoadOptions` (device, dtype, delta, ...).

        ``head_map`` is a map, a file, None for none, or "auto" for the map that ships for these
        weights, if there is one. With ``planned`` a request runs dense where the policy is
        predicted to be slower. Bad input raises `InputError`.
        """
        loaded = model if isinstance(model, LoadedModel) else load_model(model, LoadOptions(**load))
        self.session = Session(loaded, template, store or MemoryStore(), settings, salt)
        self.policy = _as_policy(policy) if policy is not None else QuestionDrop()
        self.head_map = self._fitting(head_map)
        self._planner = Planner(self.session.executor) if planned else None
        if self._planner is not None:
            self._planner.calibrate()

    def segment(self, text: str | Document, title: str = "") -> Segment:
        """Build and store the state of a document now, so that the first request finds it."""
        document = text if isinstance(text, Document) else Document(text, title)
        start = time.perf_counter()
        token_ids = self.session.tokeniser.segment(document)
        state = self.session.build(token_ids)
        key = self.session.namespace.key("segment", token_ids).hex()
        return Segment(key, len(state), state.num_bytes, time.perf_counter() - start)

    def prompt(
        self,
        documents: Sequence[Document | str] = (),
        question: str = "",
        *,
        text: str | None = None,
        system: str | None = None,
    ) -> Prompt:
        """The tokenised prompt of a request: documents and a question, or one ``text``."""
        if (text is None) == (not documents and not question):
            raise InputError("a request has either documents and a question, or one text")
        if text is not None:
            return self.session.tokeniser.plain(text, system)
        return self.session.tokeniser.prompt(documents, question, system)

    def generate(
        self,
        documents: Sequence[Document | str] = (),
        question: str = "",
        *,
        policy: Policy | str | None = None,
        max_tokens: int = 64,
        **options: Any,
    ) -> Generation:
        """Answer ``question`` over ``documents``.

        ``options`` are those of `stream`.
        """
        stream = self.stream(documents, question, policy=policy, max_tokens=max_tokens, **options)
        for _ in stream:
            pass
        if stream.result is None:
            raise RuntimeError("the stream ended without a result")
        return stream.result

    def stream(
        self,
        documents: Sequence[Document | str] = (),
        question: str = "",
        *,
        policy: Policy | str | None = None,
        max_tokens: int = 64,
        text: str | None = None,
        system: str | None = None,
        stop: Sequence[str] = (),
        store: bool = True,
        **sampling: Any,
    ) -> Stream:
        """As `generate`, piece by piece. ``text`` replaces documents and question by one string.

        ``stop`` ends the answer before any of these strings. ``sampling`` takes temperature, top_p
        and seed. With ``store`` the state of segments that were new is built once the answer is
        complete.
        """
        prompt = self.prompt(documents, question, text=text, system=system)
        chosen = self.policy if policy is None else _as_policy(policy)
        if chosen.needs_head_map and self.head_map is None:
            raise InputError(f"policy {chosen.name} needs a head map")
        self.session.check_length(prompt, max_tokens)
        options = Sampling(max_tokens=max_tokens, **sampling)
        return Stream(self._run(prompt, chosen, options, tuple(stop), store))

    def compare(
        self,
        documents: Sequence[Document | str],
        question: str,
        policies: Sequence[Policy | str],
        *,
        max_tokens: int = 16,
        system: str | None = None,
    ) -> list[Comparison]:
        """Every policy next to dense on one prompt whose segments are stored."""
        prompt = self.prompt(documents, question, system=system)
        chosen = [_as_policy(policy) for policy in policies]
        return compare(self.session, prompt, chosen, self.head_map, max_tokens)

    def _run(
        self, prompt: Prompt, policy: Policy, sampling: Sampling, stop: tuple[str, ...], store: bool
    ) -> Iterator[str | Generation]:
        session = self.session
        start, clock = time.perf_counter(), Clock(session.model.adapter.device)
        lookup, decision = self._decide(prompt, policy, clock)
        prefilled = session.prefill(
            prompt,
            decision.policy,
            self.head_map,
            room=sampling.max_tokens,
            lookup=lookup,
            clock=clock,
        )
        seconds = prefilled.seconds
        ttft = time.perf_counter() - start
        start = time.perf_counter()
        model = session.model
        writer = TextWriter(model.tokenizer, stop, end_token_ids=model.end_token_ids)
        for token in decode(session.executor, prefilled, model.end_token_ids, sampling):
            yield from writer.add(token)
            if writer.stopped:
                break
        yield from writer.flush()
        seconds = {**seconds, "decode": time.perf_counter() - start}
        if store:
            start = time.perf_counter()
            session.build_missing(prompt)
            seconds["build"] = time.perf_counter() - start
        yield Generation(
            text=writer.text,
            token_ids=tuple(writer.token_ids),
            finish_reason="stop" if writer.stopped else "length",
            policy=prefilled.plan.policy,
            decision=decision.reason,
            flops_share=prefilled.flops_share,
            ttft=ttft,
            seconds=seconds,
            reuse=_report(prefilled, lookup),
            plan=prefilled.plan,
        )

    def _decide(self, prompt: Prompt, policy: Policy, clock: Clock) -> tuple[Known, Decision]:
        """Look the prompt up and let the planner choose."""
        lookup = self.session.look_up(prompt)
        clock.mark("lookup")
        if self._planner is None:
            return lookup, Decision(policy, "asked for, without planning")
        decision = self._planner.decide(lookup.layout, policy, self.head_map)
        clock.mark("plan")
        return lookup, decision

    def _fitting(self, head_map: HeadMap | str | Path | None) -> HeadMap | None:
        if head_map == "auto":
            found = shipped_map(self.session.weights)
        elif isinstance(head_map, str | Path):
            found = HeadMap.load(head_map)
        else:
            found = head_map
        return (
            None if found is None else found.fit(self.session.model.adapter, self.session.weights)
        )


def _report(prefilled: Prefilled, lookup: Lookup) -> ReuseReport:
    """Counted from the executed plan, not from what was found."""
    plan, total = prefilled.plan, len(prefilled.token_ids)
    throughout = len(plan.layers[-1].active)  # sets only shrink: these ran in every layer
    return ReuseReport(
        prompt_tokens=total,
        reused_tokens=total - throughout,
        cached_tokens=plan.cached_tokens,
        segments=lookup.outcomes,
    )


def _as_policy(policy: Policy | str) -> Policy:
    return parse_policy(policy) if isinstance(policy, str) else policy


__all__ = ["LLM", "Generation", "ReuseReport", "Segment", "Stream"]
