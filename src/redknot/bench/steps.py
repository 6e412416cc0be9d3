"""Greedy steps of a decode batch, each timed until the host knows its tokens."""

import time
from dataclasses import dataclass, field

from redknot.bench.records import Spread
from redknot.execution.batch import EAGER_STEPS, DecodeBatch

FIRST_STEPS = EAGER_STEPS + 1
"Steps that compile and capture: reported apart."


@dataclass(slots=True, eq=False)
class Stepper:
    """A batch and the last token of each of its requests."""

    batch: DecodeBatch
    tokens: list[int]
    seconds: list[float] = field(default_factory=list)

    def step(self) -> None:
        """One new token for every request."""
        start = time.perf_counter()
        self.tokens = self.batch.step(self.tokens).argmax(-1).tolist()
        self.seconds.append(time.perf_counter() - start)

    @property
    def first_seconds(self) -> float:
        """Of the steps until one is a replay."""
        return sum(self.seconds[:FIRST_STEPS])

    @property
    def spread(self) -> Spread:
        """Median, 20 and 80 per cent of the steps after them."""
        return Spread.of(self.seconds[FIRST_STEPS:], (20, 80))

    @property
    def tokens_per_second(self) -> float:
        """Of all requests together, by the sum of the steps after the first."""
        later = self.seconds[FIRST_STEPS:]
        return len(self.tokens) * len(later) / sum(later)
