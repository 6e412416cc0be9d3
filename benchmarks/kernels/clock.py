"""Timing of calls: one launch at a time, or the replay of a CUDA graph of several."""

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from .peers import Call, graphed

SCRATCH_BYTES = 2**28
"Written before each sample; four times the L2 cache of an H200."
MOST_SAMPLES = 200
FEWEST_SAMPLES = 3


class Eager:
    """`triton.testing.do_bench`'s method without its five runs ahead: 128K rows take 0.5 s.

    On a CPU by the wall clock.
    """

    def __init__(self, calls: Sequence[Call], device: torch.device) -> None:
        self._calls, self._device = calls, device
        self._launches = 1
        self.how = "wall clock" if device.type == "cpu" else "single calls, L2 cleared before each"

    def samples(self, budget: float) -> list[float]:
        """Microseconds of single calls after one to warm up, for about ``budget`` seconds."""
        first = self._time(0, torch.empty(0, device=self._device)) / 1e6
        count = min(MOST_SAMPLES, max(FEWEST_SAMPLES, int(budget / max(first, 1e-7))))
        size = SCRATCH_BYTES if self._device.type == "cuda" else 0
        scratch = torch.empty(size, dtype=torch.uint8, device=self._device)
        if self._device.type == "cpu":
            return [self._time(index, scratch) for index in range(count)]
        pairs = [self._events(index, scratch) for index in range(count)]
        torch.cuda.synchronize()
        return [start.elapsed_time(end) * 1e3 / self._launches for start, end in pairs]

    def _time(self, index: int, scratch: Tensor) -> float:
        if self._device.type == "cuda":
            start, end = self._events(index, scratch)
            torch.cuda.synchronize()
            return start.elapsed_time(end) * 1e3
        begin = time.perf_counter()
        self._calls[index % len(self._calls)]()
        return (time.perf_counter() - begin) * 1e6

    def _events(self, index: int, scratch: Tensor) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        scratch.zero_()
        start.record()
        self._calls[index % len(self._calls)]()
        end.record()
        return start, end


class Replays(Eager):
    """A graph of ``launches`` calls going round over copies of the inputs; a sample is their mean.

    Without the cost of Python, which an engine that replays graphs does not pay either.
    """

    def __init__(self, calls: Sequence[Call], device: torch.device, launches: int) -> None:
        if device.type == "cpu":
            super().__init__(calls, device)
            return

        def all_calls() -> Tensor:
            for index in range(launches):
                out = calls[index % len(calls)]()
            return out

        super().__init__([graphed(all_calls, warmup=1)], device)
        self._read_by_the_graph = tuple(calls)
        self._launches = launches
        copies = f", {len(calls)} copies of the inputs in turn" if len(calls) > 1 else ""
        self.how = f"CUDA graph of {launches} calls{copies}"
