"""An engine that says what it is told to, in the manner of `EngineClient`."""

import asyncio
import hashlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from redknot.engine.client import EngineGone, Event, RequestRefused
from redknot.engine.messages import (
    Ended,
    Heartbeat,
    PoolUse,
    Prefilled,
    Produced,
    Ready,
    Refused,
    Report,
    SegmentAdd,
    SegmentDelete,
    SegmentInfo,
    SegmentQuery,
    SegmentReport,
    Segments,
    Submit,
    TokenInfo,
)
from redknot.models.byte_tokenizer import byte_tokenizer

TOKENIZER = byte_tokenizer()
CONTEXT = 2048
READY = Ready(
    model="tiny",
    context_length=CONTEXT,
    max_requests=8,
    num_pages=64,
    page_bytes=1024,
    pool_tokens=2 * CONTEXT,
    policy="question_drop",
    head_map="",
    end_token_ids=(TOKENIZER.eos_token_id,),
)
POOL = PoolUse(total=64, free=40, requests=16, prefixes=8, by_class={"global": 12, "local": 4})
COUNTERS = {
    "prompt_tokens": 100.0,
    "generation_tokens": 20.0,
    "cached_tokens": 30.0,
    "hit_tokens.device": 25.0,
    "hit_tokens.host": 15.0,
    "missed_tokens": 60.0,
    "prefix_queries": 90.0,
    "prefix_hits": 45.0,
    "requests.stop": 3.0,
    "requests.cancelled": 1.0,
    "preemptions": 2.0,
    "stage_seconds.probe": 0.5,
    "gauge.store_bytes": 4096.0,
    "something.new": 7.0,
    "other-thing": 8.0,
}


@dataclass(eq=False)
class ScriptedEngine:
    """Answers ``text``; set the fields to change how."""

    text: str = "The bridge was built in 1904. 🙂 Příliš žluťoučký kůň."
    ready: Ready = READY
    ends: bool = True
    "Say an end token after the text; else the text begins anew."
    pause: float = 0.0
    "Seconds before each token."
    per_step: int = 1
    "Tokens in one event."
    capacity: int | None = None
    "Requests at one time; one more is refused."
    fail_after: int | None = None
    "Tokens before the engine reports an error."
    cached: float = 0.0
    "Share of a prompt that counts as cached."
    is_alive: bool = True
    latest: Heartbeat = Heartbeat(time=1.0, waiting=2, running=1, pool=POOL, counters=COUNTERS)
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    submitted: list[Submit] = field(default_factory=list)
    cancelled: list[tuple[str, int | None]] = field(default_factory=list)
    running: set[str] = field(default_factory=set)
    stored: dict[tuple[str, str], SegmentInfo] = field(default_factory=dict)

    async def submit(self, request: Submit) -> AsyncGenerator[Event, None]:
        """As the true one: refusal first, cancelled when left."""
        if self.gone.is_set():
            raise EngineGone("the engine process has ended")
        self.submitted.append(request)
        if self.capacity is not None and len(self.running) >= self.capacity:
            raise RequestRefused(
                Refused(
                    request_id=request.request_id, status=429, code="queue_full", message="full"
                )
            )
        self.running.add(request.request_id)
        left = request.sampling.n
        try:
            await asyncio.sleep(self.pause)
            yield Prefilled(request_id=request.request_id, report=self._report(request))
            plans = [iter(self._events(request, index)) for index in range(request.sampling.n)]
            while left:
                for plan in plans:
                    event = next(plan, None)
                    if event is None:
                        continue
                    await asyncio.sleep(self.pause)
                    if self.gone.is_set():
                        raise EngineGone("the engine process has ended")
                    left -= isinstance(event, Ended)
                    yield event
        finally:
            self.running.discard(request.request_id)
            if left:
                await asyncio.sleep(0)  # the true one awaits its socket
                self.cancelled.append((request.request_id, None))

    async def stop(self, request_id: str, choice: int) -> None:
        """Remember it."""
        self.cancelled.append((request_id, choice))

    async def segments(self, asked: SegmentAdd | SegmentQuery | SegmentDelete) -> Segments:
        """A store of names."""
        if isinstance(asked, SegmentAdd):
            name = f"{asked.salt}:{asked.token_ids}"
            key = hashlib.sha256(name.encode()).hexdigest()
            size = len(asked.token_ids)
            info = SegmentInfo(
                key=key, num_tokens=size, num_bytes=64 * size, state="ready", tier="device"
            )
            self.stored[asked.salt, key] = info
            return Segments(request_id=asked.request_id, segments=(info,))
        if isinstance(asked, SegmentDelete):
            if self.stored.pop((asked.salt, asked.key), None) is None:
                raise RequestRefused(
                    Refused(request_id=asked.request_id, status=404, code="not_found", message="no")
                )
            return Segments(request_id=asked.request_id)
        found = tuple(
            info
            for (salt, key), info in self.stored.items()
            if salt == asked.salt and (asked.keys is None or key in asked.keys)
        )
        return Segments(request_id=asked.request_id, segments=found)

    async def close(self, drain_seconds: float = 30.0) -> None:
        """End."""
        self.gone.set()

    def kill(self) -> None:
        """End."""
        self.gone.set()

    def _events(self, request: Submit, choice: int) -> list[Event]:
        ids = list(TOKENIZER(self.text, add_special_tokens=False).input_ids)
        sampling, name = request.sampling, request.request_id
        ended = {"request_id": name, "choice": choice}
        if self.fail_after is not None:
            tokens = tuple(TokenInfo(token) for token in ids[: self.fail_after])
            failed = Ended(**ended, reason="error", message="out of luck")
            return [Produced(**ended, tokens=tokens), failed]
        stop = None
        if self.ends and not sampling.ignore_eos:
            ids.append(TOKENIZER.eos_token_id)
        else:
            ids *= 1 + sampling.max_tokens // len(ids)
        for at, token in enumerate(ids[: sampling.max_tokens]):
            known = () if sampling.ignore_eos else (TOKENIZER.eos_token_id,)
            if token in (*known, *sampling.stop_token_ids):
                ids, stop = ids[: at + 1], token
                break
        ids = ids[: sampling.max_tokens]
        infos = [self._info(token, sampling.logprobs) for token in ids]
        steps = [
            Produced(**ended, tokens=tuple(infos[at : at + self.per_step]))
            for at in range(0, len(infos), self.per_step)
        ]
        reason = "length" if stop is None else "stop"
        return [*steps, Ended(**ended, reason=reason, stop_token=stop)]

    def _info(self, token: int, logprobs: int | None) -> TokenInfo:
        if logprobs is None:
            return TokenInfo(token)
        top = tuple((other % 256, -0.5 - other) for other in range(token, token + logprobs))
        return TokenInfo(token, -0.5, top)

    def _report(self, request: Submit) -> Report:
        size = len(request.token_ids)
        cached = int(size * self.cached)
        return Report(
            policy=request.policy or self.ready.policy,
            decision="as asked",
            prompt_tokens=size,
            cached_tokens=cached,
            recomputed_tokens=size - cached,
            flops_share=1.0 - self.cached,
            segments=tuple(
                SegmentReport(
                    start=span.start,
                    stop=span.stop,
                    title=span.title,
                    hit="device" if self.cached else "none",
                    reason="" if self.cached else "first sight",
                    recomputed=0 if self.cached else span.stop - span.start,
                )
                for span in request.spans
            ),
            seconds={"queue": 0.001, "probe": 0.002},
        )
