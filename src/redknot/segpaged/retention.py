"""Which positions may rows still to come see? The pages between those are given back."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from redknot.kernels.attend import Reach


class FutureRows(NamedTuple):
    """Query rows at ``first`` and later, before ``stop`` (None: without end), under one reach."""

    reach: Reach
    first: int = 0
    stop: int | None = None

    def seen(self, next_position: int) -> list[tuple[int, int]]:
        """Spans of positions that those rows from ``next_position`` on may see."""
        return self.reach.spans(max(self.first, next_position), self.stop)


@dataclass(frozen=True, slots=True, eq=False)
class Retention:
    """Rows of a page table by what their future query rows see; made once per request."""

    classes: tuple[tuple[Int[np.ndarray, "row"], tuple[FutureRows, ...]], ...]

    @classmethod
    def of(
        cls,
        future: Sequence[tuple[FutureRows, ...]],
        rows: Int[np.ndarray, "row"] | None = None,
    ) -> "Retention":
        """Group ``rows`` (None: all) by equal ``future``; a page stays if any of it sees it."""
        index = np.arange(len(future)) if rows is None else np.asarray(rows)
        if len(index) != len(future):
            raise ValueError(f"{len(future)} futures for {len(index)} rows")
        members: dict[tuple[FutureRows, ...], list[int]] = {}
        for place, stages in enumerate(future):
            members.setdefault(stages, []).append(place)
        return cls(tuple((index[places], stages) for stages, places in members.items()))

    @classmethod
    def phased(
        cls,
        prefill: Sequence[Reach],
        decode: Sequence[Reach],
        border: int,
        rows: Int[np.ndarray, "row"] | None = None,
    ) -> "Retention":
        """Rows before ``border`` look through ``prefill``, later ones through ``decode``."""
        pairs = zip(prefill, decode, strict=True)
        future = [(FutureRows(old, 0, border), FutureRows(new, border)) for old, new in pairs]
        return cls.of(future, rows)

    def gaps(
        self, next_position: int, page_size: int, num_pages: int
    ) -> Iterator[tuple[Int[np.ndarray, "row"], int, int]]:
        """Rows with a range of their first ``num_pages`` that no row from there on sees."""
        for rows, stages in self.classes:
            spans = [span for stage in stages for span in stage.seen(next_position)]
            done = 0
            for first, stop in sorted((a // page_size, -(-b // page_size)) for a, b in spans):
                if done < min(first, num_pages):
                    yield rows, done, min(first, num_pages)
                done = max(done, stop)
            if done < num_pages:
                yield rows, done, num_pages
