"""Many clients of one engine: each asks again as soon as it has its answer."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import msgspec

from redknot.bench.context import Bench
from redknot.bench.prompts import PromptShape, Request, Tokens
from redknot.bench.records import Spread, TrafficRow
from redknot.bench.room import SHORT_OF_MEMORY, release
from redknot.bench.setting import DENSE, Setting
from redknot.engine.config import EngineConfig
from redknot.engine.engine import Engine
from redknot.engine.messages import Output, SamplingSpec, SpanHint, Submit
from redknot.engine.setup import build_engine
from redknot.errors import InputError

NOTE = (
    "every request takes documents of one pool, in random order, behind the same prefix; clients"
    " are in this process and ask the engine itself, so that HTTP and tokenising are not in it"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrafficSettings:
    """The load."""

    requests: int = 64
    "Of each number of clients, behind one for each client that nobody measures."
    documents: int = 32
    "In the pool that prompts take theirs from."
    new_tokens: int = 64
    segment_tokens: int = 2048
    reserve_gib: float = 24.0
    "Of device memory: for activations, graphs and segments."
    pool_gib: float | None = None
    "The pool of pages; None takes all but the reserve."

    def __post_init__(self) -> None:
        if self.requests < 1 or self.new_tokens < 2:
            raise InputError("traffic needs 1 request and 2 new tokens at least")


def whole_documents(shape: PromptShape) -> PromptShape:
    """The shape with its last segment as long as the others: stored documents are not cut."""
    count, question = len(shape.segments), shape.question
    return replace(shape, tokens=shape.prefix + count * shape.segment_tokens + question)


@dataclass(frozen=True, slots=True, eq=False)
class Documents:
    """What all prompts are made of."""

    prefix: list[int]
    segments: list[list[int]]

    @classmethod
    def of(cls, bench: Bench, shape: PromptShape, count: int) -> "Documents":
        """The seed's own; ``shape`` is one of whole documents."""
        if count < len(shape.segments):
            raise InputError(f"a prompt of {len(shape.segments)} documents out of {count}")
        tokens = Tokens(bench.session, bench.maps.seed)
        prefix = tokens.prefix(shape.prefix)
        return cls(prefix, [tokens.draw(shape.segment_tokens) for _ in range(count)])

    def as_request(self) -> Request:
        """All of them in one prompt, to be built."""
        return Request.of(self.prefix, self.segments, self.prefix[:1])

    def requests(self, bench: Bench, shape: PromptShape, seed: int) -> Iterator[Request]:
        """Prompts without end."""
        tokens = Tokens(bench.session, seed)
        while True:
            order = tokens.permutation(len(self.segments))[: len(shape.segments)]
            yield Request.of(
                self.prefix,
                [self.segments[place] for place in order],
                tokens.draw(shape.question),
            )


@dataclass(slots=True)
class Answer:
    """When things happened to one request, on the process's clock."""

    asked: float
    times: list[float] = field(default_factory=list)
    "Of each token."
    cached: int = 0
    prompt: int = 0


class Clients:
    """A closed loop over one engine."""

    def __init__(self, engine: Engine, requests: Iterator[Request], new_tokens: int) -> None:
        self._engine, self._requests, self._new_tokens = engine, requests, new_tokens
        self._open: dict[str, Answer] = {}
        self._asked = 0

    def run(self, clients: int, count: int) -> list[Answer]:
        """Ask ``count`` times, ``clients`` at a time."""
        done: list[Answer] = []
        left = count
        while len(done) < count:
            while left and len(self._open) < clients:
                self._ask()
                left -= 1
            output = self._engine.turn()
            if output is not None:
                done += self._take(output)
        return done

    def _ask(self) -> None:
        request, self._asked = next(self._requests), self._asked + 1
        submit = Submit(
            request_id=str(self._asked),
            token_ids=list(request.token_ids),
            spans=tuple(SpanHint(start=start, stop=stop) for start, stop in request.spans),
            probe=request.probe,
            sampling=SamplingSpec(max_tokens=self._new_tokens, ignore_eos=True),
            arrived=time.time(),
        )
        self._open[submit.request_id] = Answer(time.perf_counter())
        refusal = self._engine.submit(submit)
        if refusal is not None:
            raise InputError(refusal.message)

    def _take(self, output: Output) -> list[Answer]:
        now = time.perf_counter()
        for told in output.prefilled:
            answer = self._open[told.request_id]
            answer.cached, answer.prompt = told.report.cached_tokens, told.report.prompt_tokens
        for produced in output.produced:
            self._open[produced.request_id].times += [now] * len(produced.tokens)
        for ended in output.ended:
            if ended.reason != "length":
                raise RuntimeError(f"a request ended by {ended.reason}: {ended.message}")
        return [self._open.pop(ended.request_id) for ended in output.ended]


def traffic(
    bench: Bench,
    shape: PromptShape,
    settings: Sequence[Setting],
    clients: Sequence[int],
    how: TrafficSettings,
) -> Iterator[TrafficRow]:
    """A row for each number of clients and setting, dense first; the documents are stored."""
    documents = Documents.of(bench, shape, how.documents)
    for count in clients:
        dense: TrafficRow | None = None
        for setting in (DENSE, *settings):
            requests = documents.requests(bench, shape, bench.maps.seed + count)
            row = TrafficRow(name=setting.label, share=setting.share, clients=count)
            try:
                row = _loaded(bench, setting, requests, count, how)
            except SHORT_OF_MEMORY as error:
                row = msgspec.structs.replace(row, skipped=str(error).splitlines()[0])
            bench.session.forget(segments=False)
            release(bench.device)
            dense = dense or row
            yield beside(row, dense)


def _loaded(
    bench: Bench, setting: Setting, requests: Iterator[Request], clients: int, how: TrafficSettings
) -> TrafficRow:
    config = EngineConfig(max_requests=clients, max_waiting=clients, build_idle=False)
    head_map = bench.head_map(setting.share)
    engine = build_engine(config, bench.session, setting.policy, head_map)
    load = Clients(engine, requests, how.new_tokens)
    load.run(clients, clients)  # compiles, and captures the step of so many
    start, before = time.perf_counter(), engine.counters.snapshot()["preemptions"]
    answers = load.run(clients, how.requests)
    seconds = time.perf_counter() - start
    tokens = sum(len(answer.times) for answer in answers)
    gaps = [after - first for one in answers for first, after in pairwise(one.times)]
    return TrafficRow(
        name=setting.label,
        share=setting.share,
        clients=clients,
        requests=len(answers),
        seconds=seconds,
        requests_per_second=len(answers) / seconds,
        tokens_per_second=tokens / seconds,
        ttft_seconds=Spread.of([one.times[0] - one.asked for one in answers], (5, 95)),
        token_seconds=Spread.of(gaps, (5, 95)),
        cached_share=sum(one.cached for one in answers) / sum(one.prompt for one in answers),
        preemptions=int(engine.counters.snapshot()["preemptions"] - before),
    )


def beside(row: TrafficRow, dense: TrafficRow) -> TrafficRow:
    """The same with its ratios to dense."""
    if row.ttft_seconds is None or dense.ttft_seconds is None:
        return row
    rate, dense_rate = row.tokens_per_second, dense.tokens_per_second
    if rate is None or dense_rate is None:
        return row
    return msgspec.structs.replace(
        row,
        ttft_ratio=dense.ttft_seconds.median / row.ttft_seconds.median,
        tokens_per_second_ratio=rate / dense_rate,
    )
