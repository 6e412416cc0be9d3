"""Those who decode: one batch for all, and one each for requests that must be exact."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from redknot.engine.request import Choice
from redknot.engine.sampling import Picked, pick_all
from redknot.engine.step_clock import StepClock
from redknot.execution.batch import DecodeBatch
from redknot.execution.executor import Executor, Prefilled

REPLAY_TOKENS = 2048
"Of an answer that run through the model at once when it is put in place again."


@dataclass(eq=False)
class Company:
    """All choices that decode. An exact one is alone in its step, as if nobody else were there."""

    executor: Executor
    max_choices: int
    max_tokens: int
    "Of one request, prompt and answer."
    _shared: DecodeBatch = field(init=False)
    _members: list[Choice] = field(default_factory=list, init=False)
    "By their number in the shared batch."
    _numbers: dict[Choice, int] = field(default_factory=dict, init=False)
    _alone: dict[Choice, DecodeBatch] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._shared = DecodeBatch(self.executor, self.max_choices, self.max_tokens)

    def __len__(self) -> int:
        return len(self._members) + len(self._alone)

    def add(self, choice: Choice, prefilled: Prefilled) -> None:
        """Let ``choice`` decode from its last token on; ``prefilled`` holds those before."""
        if choice.request.submit.exact:
            batch = self._alone[choice] = self._batch_of_one()
            batch.add(prefilled)
        else:
            self._numbers[choice] = self._shared.add(prefilled)
            self._members.append(choice)

    def remove(self, choice: Choice) -> Prefilled | None:
        """Take a choice out; None if it did not decode."""
        alone = self._alone.pop(choice, None)
        if alone is not None:
            return alone.remove(0)
        number = self._numbers.pop(choice, None)
        if number is None:
            return None
        last = self._members.pop()
        if last is not choice:
            self._members[number], self._numbers[last] = last, number
        return self._shared.remove(number)

    def growth(self, choice: Choice) -> int:
        """Pages that the next token of ``choice`` needs at most."""
        batch, number = self._place(choice)
        cache, length = batch.requests[number].cache, batch.lengths[number]
        return cache.num_rows if length >= cache.length else 0

    def own_pages(self, choices: Sequence[Choice]) -> int:
        """Pages that nobody but ``choices`` holds."""
        places = [self._place(choice) for choice in choices]
        held = np.concatenate([batch.requests[number].cache.held for batch, number in places])
        times = np.bincount(held)
        pages = times.nonzero()[0]
        return int((self.executor.storage.pool.references(pages) == times[pages]).sum())

    def prefilled(self) -> list[Prefilled]:
        """Prompts of all choices that decode."""
        alone = [batch.requests[0] for batch in self._alone.values()]
        return [*self._shared.requests, *alone]

    def step(self, clock: StepClock) -> list[tuple[Choice, Picked]]:
        """One more token for everybody."""
        found: list[tuple[Choice, Picked]] = []
        batches = [(self._shared, list(self._members))] if self._members else []
        batches += [(batch, [choice]) for choice, batch in self._alone.items()]
        for batch, members in batches:
            with clock.model():
                logits = batch.step([choice.tokens[-1] for choice in members])
            with clock.sampling():
                picked = pick_all([choice.picker for choice in members], logits)
            found += zip(members, picked, strict=True)
        return found

    def resume(self, choice: Choice, prefilled: Prefilled, alive: Callable[[], None]) -> None:
        """As `add`, for one that was preempted: the tokens it had chosen get their K/V again.

        An exact one goes the way it went: token by token, in the batch that it goes on in.
        ``alive`` is called all along: an answer may be long.
        """
        known = choice.tokens[:-1]
        if known and not choice.request.submit.exact:
            prefilled.retain()
            for part in torch.tensor(known).split(REPLAY_TOKENS):
                for _ in self.executor.appending(prefilled, part):
                    alive()
        self.add(choice, prefilled)
        if choice.request.submit.exact:
            for token in known:
                self._alone[choice].step([token])
                alive()

    def _batch_of_one(self) -> DecodeBatch:
        storage = self.executor.storage
        if not storage.pool.num_free:
            storage.reclaim(1)  # for its idle slots
        return DecodeBatch(self.executor, 1, self.max_tokens, copied=True)

    def _place(self, choice: Choice) -> tuple[DecodeBatch, int]:
        alone = self._alone.get(choice)
        return (alone, 0) if alone is not None else (self._shared, self._numbers[choice])
