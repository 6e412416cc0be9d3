"""Where the time of one turn goes: model, sampling, and everything else."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(slots=True)
class StepClock:
    """Seconds of one turn. On a GPU the model's work is waited for while tokens are chosen."""

    model_seconds: float = 0.0
    sampling_seconds: float = 0.0
    _start: float = field(default_factory=time.perf_counter)

    @property
    def seconds(self) -> float:
        """Since the turn began."""
        return time.perf_counter() - self._start

    @contextmanager
    def model(self) -> Iterator[None]:
        """Charge a block to the model."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.model_seconds += time.perf_counter() - start

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Charge a block to sampling."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.sampling_seconds += time.perf_counter() - start
