"""The rule of one visibility group, as stored on disk."""

from collections.abc import Sequence
from enum import StrEnum

import msgspec


class HeadClass(StrEnum):
    """How much a head sees."""

    GLOBAL = "global"
    LOCAL = "local"
    DENSE = "dense"  # global and never sparsified


class HeadRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One group's class and reach."""

    head_class: HeadClass = HeadClass.GLOBAL
    window: int | None = None
    "Tokens, the query's own included; None means the whole prompt."
    sink: int = 0
    "First tokens of the prompt that stay visible."

    def __post_init__(self) -> None:
        if (self.head_class is HeadClass.LOCAL) != (self.window is not None):
            raise ValueError("exactly the local heads carry a window")
        if self.window is not None and (self.window < 1 or self.sink < 0):
            raise ValueError(f"window {self.window} or sink {self.sink} out of range")

    @classmethod
    def local(cls, window: int, sink: int) -> "HeadRule":
        """A head that sees its sink and its window."""
        return cls(head_class=HeadClass.LOCAL, window=window, sink=sink)

    @classmethod
    def fullest(cls, rules: Sequence["HeadRule"]) -> "HeadRule":
        """The smallest rule that shows all that any of ``rules`` shows."""
        full = [rule for rule in rules if rule.window is None]
        if full:
            dense = any(rule.head_class is HeadClass.DENSE for rule in full)
            return cls(head_class=HeadClass.DENSE if dense else HeadClass.GLOBAL)
        windows = [rule.window for rule in rules if rule.window is not None]
        return cls.local(max(windows), max(rule.sink for rule in rules))


LayerRules = tuple[tuple[HeadRule, ...], ...]
