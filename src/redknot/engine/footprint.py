"""How many pages a request needs, before anything of it is computed."""

from dataclasses import dataclass

from redknot.execution.executor import Executor
from redknot.execution.visibility import Visibility
from redknot.heads import HeadMap
from redknot.kernels.attend import Reach
from redknot.recovery import Policy
from redknot.segments import Prompt


@dataclass(frozen=True, slots=True)
class Footprint:
    """Pages of one request."""

    prefill: int
    "While its prompt is computed: every token in every (layer, group)."
    last: int
    "When the last tokens of all its choices come: what they see."

    @classmethod
    def of(
        cls,
        executor: Executor,
        prompt: Prompt,
        policy: Policy,
        head_map: HeadMap | None,
        new_tokens: int,
        choices: int,
    ) -> "Footprint":
        """Counted without anything that is shared with other requests."""
        size, shapes = executor.storage.page_size, executor.shapes
        border = max((span.stop for span in prompt.spans), default=0)
        copied = policy.uses_probe and border > prompt.probe[0]
        tokens = len(prompt) + (prompt.probe[1] - prompt.probe[0] if copied else 0)
        sight = Visibility.of(shapes, border, head_map, policy.windows)
        reaches = [reach for layer in sight.decode for reach in layer]
        end = len(prompt) + new_tokens
        first = sum(_held(reach, end, size) for reach in reaches)
        other = sum(min(_held(reach, end, size), -(-new_tokens // size) + 1) for reach in reaches)
        return cls(len(reaches) * -(-tokens // size), first + (choices - 1) * other)


def tokens_that_fit(executor: Executor, probe_tokens: int) -> int:
    """Tokens of one request, prompt and answer, for which the pool has room in any case."""
    rows = sum(shape.num_groups for shape in executor.shapes)
    pages = (executor.storage.pool.num_pages - 1) // rows  # 1: the page of idle slots
    return max(0, pages * executor.storage.page_size - probe_tokens)


def build_pages(executor: Executor, tokens: int) -> int:
    """Pages while the state of a segment is built, its anchor counted among ``tokens``."""
    rows = sum(shape.num_groups for shape in executor.shapes)
    return rows * -(-tokens // executor.storage.page_size)


def _held(reach: Reach, tokens: int, size: int) -> int:
    """Pages of one (layer, group) at most, while its rows grow to ``tokens``.

    A row that grows into a new page lets go of what it no longer sees only then: hence the last 1.
    """
    whole = -(-tokens // size)
    if reach.span is None:
        return whole
    return min(whole, -(-reach.sink // size) + -(-(reach.span - 1) // size) + 1 + 1)
