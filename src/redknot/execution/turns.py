"""Work in turns: generators that stop behind every layer, so that requests can take turns."""

from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")

Turns = Generator[int, None, T]
"""Yields how many rows just ran through a layer, tokens where a segment was placed, 0 where pages
were taken; later layers of a pass have no more rows."""


def drained(turns: Turns[T]) -> T:
    """What ``turns`` returns, without a pause."""
    while True:
        try:
            next(turns)
        except StopIteration as end:
            return end.value
