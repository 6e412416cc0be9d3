"""One model with its tokeniser, store and executor: everything that a request needs."""

from dataclasses import dataclass, field
from functools import cached_property

import torch

from redknot.errors import InputError
from redknot.execution.builder import build_state
from redknot.execution.clock import Clock
from redknot.execution.executor import ExecutionSettings, Executor, Prefilled
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
from redknot.segments.store import ExactPrefixes


@dataclass(eq=False)
class Session:
    """Not thread-safe: one request at a time."""

    model: LoadedModel
    template: PromptTemplate = PromptTemplate()
    store: SegmentStore = field(default_factory=MemoryStore)
    settings: ExecutionSettings = ExecutionSettings()
    salt: str = ""
    "Tenant: state of one salt is never found under another."

    def __post_init__(self) -> None:
        adapter = self.model.adapter
        shape = adapter.layers[0].shape
        self.tokeniser = Tokeniser(self.model.tokenizer, self.template)
        self.executor = Executor(adapter, self.settings)
        self.prefixes = ExactPrefixes()
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

    def look_up(self, prompt: Prompt) -> Lookup:
        """What is known of ``prompt``."""
        return look_up(prompt, self.namespace, self.store, self.prefixes, self._shape)

    def build(self, token_ids: torch.Tensor) -> SegmentState:
        """Canonical state of ``token_ids``, out of the store or built and stored now."""
        key = self.namespace.key("segment", token_ids)
        state = self.store.get(key)
        if state is None or self._shape.refuses(state, token_ids):
            self.store.delete(key)
            state = build_state(
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
        self.prefixes = ExactPrefixes()
        for key in self.store.keys() if segments else ():
            self.store.delete(key)

    def remember(self, beginning: SegmentState) -> None:
        """Keep the exact state of a prompt's first tokens for prompts that begin alike."""
        self.prefixes.put(self.namespace.key("exact", beginning.token_ids), beginning)

    def prefill(
        self,
        prompt: Prompt,
        policy: Policy,
        head_map: HeadMap | None = None,
        *,
        room: int = 0,
        lookup: Lookup | None = None,
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
        first = prompt.spans[0].start if prompt.spans else 0
        keep = len(prompt) if policy.name == "prefix" else first
        prefilled = self.executor.prefill(
            prompt.token_ids, lookup, policy, head_map, keep_beginning=keep, clock=clock
        )
        if prefilled.beginning is not None:
            self.remember(prefilled.beginning)
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
