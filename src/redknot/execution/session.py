"""One model with its tokeniser, store and executor: everything that a request needs."""

from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from redknot.errors import InputError
from redknot.execution.beginnings import Beginning, Beginnings, Scope
from redknot.execution.builder import building
from redknot.execution.clock import Clock
from redknot.execution.executor import ExecutionSettings, Executor, Prefilled
from redknot.execution.turns import Turns, drained
from redknot.heads import HeadMap
from redknot.models import LoadedModel
from redknot.models.fingerprint import fingerprint
from redknot.recovery import Policy
from redknot.segments import (
    Lookup,
    MemoryStore,
    Namespace,
    Prompt,
    PromptTemplate,
    SegmentState,
    SegmentStore,
    Tokeniser,
    look_up,
)
from redknot.segments.lookup import StateShape


@dataclass(frozen=True, slots=True, eq=False)
class Known(Lookup):
    """What is known of a prompt, and the pages of its beginning."""

    beginning: Beginning | None = None


@dataclass(eq=False)
class Session:
    """Not thread-safe: one request at a time."""

    model: LoadedModel
    template: PromptTemplate = PromptTemplate()
    store: SegmentStore = field(default_factory=MemoryStore)
    settings: ExecutionSettings = ExecutionSettings()
    salt: str = ""
    "Tenant: state of one salt is never found under another."
    beginnings_bytes: int = 1 << 30
    "Pages that beginnings of earlier prompts may keep."

    def __post_init__(self) -> None:
        adapter = self.model.adapter
        shape = adapter.layers[0].shape
        self.tokeniser = Tokeniser(self.model.tokenizer, self.template)
        self.executor = Executor(adapter, self.settings)
        self.beginnings = Beginnings(self.executor.storage, self.beginnings_bytes)
        self.namespace = Namespace(
            weights=fingerprint(self.model.hf),
            settings=adapter.settings,
            rotary=adapter.rotary.identity(),
            dtype=str(adapter.dtype),
            anchor=self.tokeniser.anchor,
            salt=self.salt,
        )
        self._shape = StateShape(
            len(adapter.layers), shape.num_groups, shape.head_dim, adapter.dtype
        )

    @cached_property
    def weights(self) -> str:
        """What a head map says it was measured on."""
        return fingerprint(self.model.hf, rounded=True)

    def look_up(self, prompt: Prompt, *, salt: str | None = None, chain: str = "") -> Known:
        """What is known of ``prompt``, to the session's tenant or to that of ``salt``.

        With ``chain`` also what an earlier turn of the same chat left behind under that name.
        """
        namespace = self._namespace(salt)
        scopes = {Scope(namespace.salt), Scope(namespace.salt, chain)}
        beginning = self.beginnings.find(prompt.token_ids, scopes)
        exact = 0 if beginning is None else beginning.tokens
        found = look_up(prompt, namespace, self.store, self._shape, exact)
        return Known(found.layout, found.hits, found.outcomes, beginning)

    def key(self, token_ids: torch.Tensor, salt: str | None = None) -> bytes:
        """What the state of a segment is stored under."""
        return self._namespace(salt).key("segment", token_ids)

    def stored(self, token_ids: torch.Tensor, salt: str | None = None) -> SegmentState | None:
        """The state of a segment, if the store has it whole."""
        state = self.store.get(self.key(token_ids, salt))
        return None if state is None or self._shape.refuses(state, token_ids) else state

    def may_store(self, tokens: int) -> bool:
        """Whether the store takes the state of so many tokens at all."""
        return self._shape.num_bytes(tokens) <= self.store.usage().capacity_bytes

    def build(self, token_ids: torch.Tensor) -> SegmentState:
        """Canonical state of ``token_ids``, out of the store or built and stored now."""
        return drained(self.building(token_ids))

    def building(self, token_ids: torch.Tensor, salt: str | None = None) -> Turns[SegmentState]:
        """As `build`, in turns; findable once the last is done."""
        key, state = self.key(token_ids, salt), self.stored(token_ids, salt)
        if state is None:
            self.store.delete(key)
            state = yield from building(
                self.model.adapter,
                token_ids,
                self.namespace.anchor,
                storage=self.executor.storage,
                parts=self.executor.parts,
            )
            self.store.put(key, state)
        return state

    def build_missing(self, prompt: Prompt) -> int:
        """Build what `look_up` found new and could find again; how many segments were built."""
        anchor = self.namespace.anchor
        if tuple(prompt.token_ids[: len(anchor)].tolist()) != anchor:
            return 0
        missing = self.look_up(prompt).missing
        texts = dict.fromkeys(
            tuple(prompt.token_ids[span.start : span.stop].tolist()) for span in missing
        )
        for text in texts:
            self.build(torch.tensor(text))
        return len(texts)

    def forget(self, *, segments: bool = True) -> None:
        """Forget the known beginnings of prompts, and all stored segments too."""
        self.beginnings.forget()
        for key in self.store.keys() if segments else ():
            self.store.delete(key)

    def remember(self, prefilled: Prefilled, tokens: int, salt: str | None = None) -> None:
        """Keep the pages of the first ``tokens`` tokens, as far as dense would compute them so."""
        tokens = min(tokens, prefilled.exact_tokens)
        if tokens > 0 and prefilled.cache.holds(tokens):
            cache = prefilled.cache.fork()
            cache.truncate(tokens)
            scope = Scope(self._namespace(salt).salt)
            self.beginnings.put(prefilled.token_ids[:tokens], cache, scope)

    def prefill(
        self,
        prompt: Prompt,
        policy: Policy,
        head_map: HeadMap | None = None,
        *,
        room: int = 0,
        lookup: Known | None = None,
        clock: Clock | None = None,
    ) -> Prefilled:
        """Run ``prompt`` under ``policy``; the time of looking up is the first stage.

        The exact state of what stands before the first segment is kept for later prompts; the
        prefix policy keeps all of it.
        """
        self.check_length(prompt, room)
        clock = clock or Clock(self.model.adapter.device)
        if lookup is None:
            lookup = self.look_up(prompt)
            clock.mark("lookup")
        beginning = None if lookup.beginning is None else lookup.beginning.cache
        prefilled = self.executor.prefill(
            prompt.token_ids, lookup, policy, head_map, beginning=beginning, clock=clock
        )
        first = prompt.spans[0].start if prompt.spans else 0
        self.remember(prefilled, len(prompt) if policy.name == "prefix" else first)
        return prefilled

    def check_length(self, prompt: Prompt, room: int = 0) -> None:
        """`InputError` unless prompt and ``room`` fit the model's context."""
        limit = self.model.adapter.context_length
        if not len(prompt):
            raise InputError("the prompt is empty")
        if len(prompt) + room > limit:
            raise InputError(
                f"the prompt has {len(prompt)} tokens and {room} may follow,"
                f" but the model's context holds {limit}"
            )

    def _namespace(self, salt: str | None) -> Namespace:
        """That of the session's tenant, or of another."""
        return self.namespace if salt is None else replace(self.namespace, salt=salt)
