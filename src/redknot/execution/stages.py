"""Wall-clock time of the stages of one request."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stages:
    """Seconds by stage name; waits for the device at the end of each."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = {}
        self._device = device

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time of the block to ``name``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    @property
    def total(self) -> float:
        """Sum of all stages."""
        return sum(self.seconds.values())
