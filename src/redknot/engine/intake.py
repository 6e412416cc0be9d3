"""From what the server submits to a request that can be scheduled, or a refusal that says why."""

from dataclasses import dataclass

import torch

from redknot.engine.footprint import Footprint
from redknot.engine.messages import Refused, Submit
from redknot.engine.request import Choice, Request
from redknot.engine.sampling import Grammars, Picker
from redknot.engine.scheduler import Job
from redknot.errors import InputError
from redknot.execution.planner import Planner
from redknot.execution.session import Session
from redknot.heads import HeadMap
from redknot.recovery import Policy
from redknot.recovery.policies import Dense, parse_policy
from redknot.segments import Prompt, Span

RECOMPUTED = 0.3
"Of the tokens of stored segments, about; only the order of those who wait depends on it."


@dataclass(eq=False)
class Intake:
    """Checks everything that can be known before any work."""

    session: Session
    planner: Planner
    policy: Policy
    "What requests run under that name none."
    head_map: HeadMap | None
    context_length: int
    "Of one request, prompt and answer."
    grammars: Grammars

    def request(self, submit: Submit) -> Request:
        """A request with its choices; `InputError` where it asks for what cannot be."""
        spec, vocabulary = submit.sampling, self.session.model.hf.config.vocab_size
        if spec.n < 1 or not 0 <= (spec.logprobs or 0) <= vocabulary:
            raise InputError(f"n from 1, logprobs from 0 to {vocabulary}")
        end_tokens = self.session.model.end_token_ids
        stop = set(submit.sampling.stop_token_ids)
        if not submit.sampling.ignore_eos:
            stop |= end_tokens
        request = Request(submit, self._prompt(submit), self._policy(submit), frozenset(stop))
        device = self.session.model.adapter.device
        request.choices = [
            Choice(request, number, Picker(submit.sampling, number, device, self.grammars))
            for number in range(submit.sampling.n)
        ]
        return request

    def job(self, request: Request) -> Job:
        """What the scheduler must know of ``request``: footprint and predicted time."""
        submit = request.submit
        most, n = submit.sampling.max_tokens, submit.sampling.n
        pages = self._footprint(request, request.asked, most, n)
        return Job(
            job_id=request.request_id,
            arrived=submit.arrived,
            pages=pages.prefill,
            last_pages=self._footprint(request, Dense(), most, n).last,  # which may run instead
            ms=self.milliseconds(self._tokens_to_run(request)),
            choices=n,
        )

    def pages_again(self, request: Request) -> int:
        """To compute its prompt once more, and the tokens that its choices have by now."""
        tokens = max(len(choice.tokens) for choice in request.left) + 1
        return self._footprint(request, Dense(), tokens, len(request.left)).last

    def milliseconds(self, tokens: int) -> float:
        """Predicted for so many tokens through all layers, attention left out."""
        rates = self.planner.calibrate()
        costs = [shape.cost for shape in self.session.executor.shapes]
        flops = sum(cost.query + cost.key_value + cost.output + cost.ffn for cost in costs)
        return 1e3 * (tokens * flops / rates.matmul + len(costs) * rates.layer_overhead)

    def pace(self, spent_ms: float, rows: int) -> float:
        """Milliseconds of a layer with ``rows`` rows whose launch took ``spent_ms``.

        A GPU has only been told to run it; how long that takes is predicted.
        """
        if self.session.model.adapter.device.type != "cuda":
            return spent_ms
        return max(spent_ms, self.milliseconds(rows) / len(self.session.executor.shapes))

    def _footprint(
        self, request: Request, policy: Policy, new_tokens: int, choices: int
    ) -> Footprint:
        executor, prompt = self.session.executor, request.prompt
        return Footprint.of(executor, prompt, policy, self.head_map, new_tokens, choices)

    def _tokens_to_run(self, request: Request) -> int:
        """About how many tokens will flow through all layers, by what is stored now."""
        prompt, salt = request.prompt, request.submit.salt
        if not request.asked.takes_segments:
            return len(prompt)
        stored = sum(
            len(span)
            for span in prompt.spans
            if self.session.store.has(
                self.session.key(prompt.token_ids[span.start : span.stop], salt)
            )
        )
        return len(prompt) - round(stored * (1 - RECOMPUTED))

    def _policy(self, submit: Submit) -> Policy:
        if submit.exact:
            return Dense()
        try:
            policy = self.policy if submit.policy is None else parse_policy(submit.policy)
        except ValueError as error:
            raise InputError(f"policy: {error}") from error
        if policy.needs_head_map and self.head_map is None:
            raise InputError(f"policy {policy.name} needs a head map, and the server has none")
        return policy

    def _prompt(self, submit: Submit) -> Prompt:
        tokens, vocabulary = len(submit.token_ids), self.session.model.hf.config.vocab_size
        if not tokens:
            raise InputError("the prompt is empty")
        if min(submit.token_ids) < 0 or max(submit.token_ids) >= vocabulary:
            raise InputError(f"token ids lie between 0 and {vocabulary - 1}")
        room = submit.sampling.max_tokens
        if tokens + room > self.context_length:
            raise TooLong(
                f"the prompt has {tokens} tokens and {room} may follow,"
                f" but a request may have {self.context_length} here"
            )
        spans = tuple(Span(span.start, span.stop, span.title) for span in submit.spans)
        borders = [0, *(border for span in spans for border in (span.start, span.stop)), tokens]
        if borders != sorted(borders) or any(not len(span) for span in spans):
            raise InputError("spans must be in order, without overlap, within the prompt")
        start, stop = submit.probe
        if not 0 <= start < stop <= tokens:
            raise InputError(f"a probe from {start} to {stop} in {tokens} tokens")
        return Prompt(torch.tensor(submit.token_ids, dtype=torch.int64), spans, (start, stop))


class TooLong(InputError):
    """Prompt and answer exceed what one request may have."""


def refused(submit: Submit, error: Exception) -> Refused:
    """Bad input as an answer."""
    long = isinstance(error, TooLong)
    return Refused(
        request_id=submit.request_id,
        status=400,
        code="context_length_exceeded" if long else "invalid_value",
        message=str(error),
        param="max_tokens" if long else None,
    )
