"""Work in turns: generators that stop behind every layer, so that requests can take turns."""

from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")

Turns = Generator[int, None, T]
"Yields how many rows just ran through a layer; the next layer has no more of them."


def drained(turns: Turns[T]) -> T:
    """What ``turns`` returns, without a pause."""
    while True:
        try:
            next(turns)
        except StopIteration as end:
            return end.value
