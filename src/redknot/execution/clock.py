"""Where the time of one request goes: on a GPU by events on its stream, so that nothing waits."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

Mark = torch.cuda.Event | float


class Clock:
    """Charges the time between marks to stages, and to parts of stages if ``detailed``.

    Whatever happens between two marks is charged to the later one, idle time included, so that the
    stages add up to the time from the first mark to the last. Where several requests take turns,
    what happens between `leave` and `come_back` is charged to `wait`.
    """

    def __init__(
        self, device: torch.device, *, detailed: bool = False, takes_turns: bool = False
    ) -> None:
        self.detailed, self.takes_turns = detailed, takes_turns
        self._device = device
        self._stage = ""
        self._first = self._now()
        self._marks: list[tuple[str, Mark]] = []

    def mark(self, stage: str) -> None:
        """Charge the time since the last mark to ``stage``."""
        self._marks.append((stage, self._now()))

    def part(self, name: str) -> None:
        """Charge the time since the last mark to a part of the stage that runs."""
        if self.detailed:
            self.mark(f"{self._stage}/{name}")

    def leave(self) -> None:
        """The turn of this request ends."""
        if self.takes_turns:
            self.mark(self._stage)

    def come_back(self) -> None:
        """The next turn of this request begins."""
        if self.takes_turns:
            self.mark("wait")

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Charge what the block leaves to its parts."""
        self._stage = name
        try:
            yield
        finally:
            self.mark(name)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by stage, in the order of their first marks; waits for the last one."""
        found: dict[str, float] = {}
        before = self._first
        if self._marks and isinstance(self._marks[-1][1], torch.cuda.Event):
            self._marks[-1][1].synchronize()
        for name, mark in self._marks:
            found[name] = found.get(name, 0.0) + _between(before, mark)
            before = mark
        return found

    def _now(self) -> Mark:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


def _between(before: Mark, after: Mark) -> float:
    if isinstance(before, torch.cuda.Event) and isinstance(after, torch.cuda.Event):
        return before.elapsed_time(after) / 1e3
    if isinstance(before, float) and isinstance(after, float):
        return after - before
    raise TypeError("marks of two clocks")
