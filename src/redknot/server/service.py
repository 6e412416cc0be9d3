"""What all routes work with: the engine, the tokenizer, the registry, the metrics."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ParamSpec, TypeVar

from transformers import PreTrainedTokenizerBase

from redknot.engine.client import EngineClient
from redknot.engine.messages import Grammar, SamplingSpec, SpanHint, Submit
from redknot.errors import InputError
from redknot.recovery.policies import parse_policy
from redknot.segments import Prompt
from redknot.server.errors import ApiError
from redknot.server.logs import Trace
from redknot.server.metrics import ServerMetrics
from redknot.server.registry import Registry
from redknot.server.rendering import Renderer
from redknot.server.schema.common import Common
from redknot.server.settings import ServerSettings

ROUNDING = 64
"Tokens for which an answer may hold pages beyond its own."
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(eq=False)
class Service:
    """One engine and all that stands in front of it."""

    client: EngineClient
    renderer: Renderer
    tokenizer: PreTrainedTokenizerBase
    settings: ServerSettings
    started: int = field(default_factory=lambda: int(time.time()))
    metrics: ServerMetrics = field(init=False)
    registry: Registry = field(init=False)
    ends: frozenset[int] = field(init=False)
    "Tokens that end an answer and are no text of it."
    _tasks: set["asyncio.Task[None]"] = field(default_factory=set)
    _worker: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))

    def __post_init__(self) -> None:
        self.metrics = ServerMetrics(self.model, self.client)
        self.registry = Registry(self.settings.max_registered_bytes)
        self.ends = frozenset(self.client.ready.end_token_ids)

    @property
    def model(self) -> str:
        """The model's name towards clients."""
        return self.settings.served_model_name or self.client.ready.model

    def spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Run ``work`` as a task that lives until it ends, whoever forgets it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def off_loop(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Long work of the host (tokenising) beside the event loop, one at a time."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._worker, partial(call, *args, **kwargs))

    def check_model(self, name: str | None) -> None:
        """Refuse a model that is not served."""
        if name is not None and name not in (self.model, self.client.ready.model):
            raise ApiError(
                404,
                f"the model {name[:128]!r} does not exist",
                param="model",
                code="model_not_found",
            )

    def room(self, prompt: Prompt, asked: int | None, param: str, choices: int | None) -> int:
        """Tokens that an answer may have; refuses what does not fit into the context.

        Where none are ``asked`` for, each of several ``choices`` gets a share of what there is.
        """
        most, length = self.client.ready.context_length, len(prompt)
        wanted = 1 if asked is None else asked
        if length + wanted > most:
            raise ApiError(
                400,
                f"This model's maximum context length is {most} tokens. However, you requested"
                f" {length + wanted} tokens ({length} in the {param}, {wanted} in the completion).",
                param=param,
                code="context_length_exceeded",
            )
        if asked is not None:
            return asked
        if choices in (None, 1):
            return most - length
        share = (self.client.ready.pool_tokens - length) // choices - ROUNDING
        return max(1, min(most - length, share))

    def submit(
        self,
        body: Common,
        prompt: Prompt,
        trace: Trace,
        *,
        request_id: str,
        salt: str,
        max_tokens: int,
        logprobs: int | None,
        grammar: Grammar | None = None,
    ) -> Submit:
        """The request as the engine takes it."""
        trace.prompt_tokens += len(prompt)
        options = body.redknot
        return Submit(
            request_id=request_id,
            token_ids=prompt.token_ids.tolist(),
            spans=tuple(
                SpanHint(start=span.start, stop=span.stop, title=span.title)
                for span in prompt.spans
            ),
            probe=prompt.probe,
            sampling=SamplingSpec(
                max_tokens=max_tokens,
                temperature=1.0 if body.temperature is None else body.temperature,
                top_p=1.0 if body.top_p is None else body.top_p,
                seed=body.seed,
                n=body.n or 1,
                logprobs=logprobs,
                stop_token_ids=self._stop_ids(body),
                ignore_eos=bool(body.ignore_eos),
                grammar=grammar,
            ),
            policy=None if options is None else _checked_policy(options.policy),
            exact=options is not None and options.exact,
            salt=salt,
            arrived=trace.arrived,
        )

    def check_ids(self, token_ids: list[int], param: str) -> None:
        """Refuse ids that are no tokens."""
        most = len(self.tokenizer)
        if any(token >= most for token in token_ids):
            raise ApiError(400, f"{param}: token ids are below {most}", param=param)

    def close(self) -> None:
        """Let the worker go."""
        self._worker.shutdown(wait=False, cancel_futures=True)

    def _stop_ids(self, body: Common) -> tuple[int, ...]:
        self.check_ids(body.stop_token_ids or [], "stop_token_ids")
        return tuple(body.stop_token_ids or ())


def _checked_policy(text: str | None) -> str | None:
    if text is not None:
        try:
            parse_policy(text)
        except InputError as error:
            raise ApiError(400, str(error), param="redknot.policy") from error
    return text
