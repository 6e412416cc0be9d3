"""What a policy is: frozen hyper-parameters and pure methods from signals to rows."""

import dataclasses
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

from jaxtyping import Bool, Int
from torch import Tensor

from redknot.recovery.layout import Layout
from redknot.recovery.signals import Signals


class Windows(StrEnum):
    """Which rows obey the head map."""

    NONE = "none"
    CONTEXT = "context"  # rows up to the end of the last segment
    DECODE = "decode"  # the question's rows and generated tokens
    ALL = "all"

    @property
    def on_context(self) -> bool:
        """Whether context rows are windowed."""
        return self in (Windows.CONTEXT, Windows.ALL)

    @property
    def on_decode(self) -> bool:
        """Whether the question and generated tokens are windowed."""
        return self in (Windows.DECODE, Windows.ALL)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Stage:
    """Where a request stands when a policy decides about one layer.

    All tensors are on the device of the model; a policy that reads one on the host makes the device
    wait.
    """

    layer: int
    num_layers: int
    layout: Layout
    signals: Signals
    active: Int[Tensor, "token"]
    "Stored tokens that are still active."
    rows: Int[Tensor, "row"]
    "All rows that flow: the active ones and those without stored state."
    skipped: Bool[Tensor, "token"]
    "Tokens that have missed some FFN."


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Base of all policies; subclass it to add one, in or outside this package.

    The executor calls `keep` and `publish` before the attention of each layer and `feed` before its
    FFN; all are pure.
    Tokens without stored state and the last token are always active; a token that has left stays
    out. Fields are the hyper-parameters; `name` is what the command line calls the policy.
    """

    windows: Windows = Windows.NONE

    name: ClassVar[str] = ""
    uses_probe: ClassVar[bool] = False
    "Whether a question pass ranks the tokens first."
    adaptive: ClassVar[bool] = False
    "Whether rows depend on what earlier layers of the same pass gave."
    needs_head_map: ClassVar[bool] = False
    takes_exact: ClassVar[bool] = True
    "Whether tokens of a known exact prefix are taken over instead of computed."
    takes_segments: ClassVar[bool] = True
    "Whether stored segments are taken over; without, their tokens are as new."

    def __post_init__(self) -> None:
        object.__setattr__(self, "windows", Windows(self.windows))
        self.check()

    def check(self) -> None:
        """Raise ValueError for hyper-parameters out of range."""

    def view(self, layout: Layout) -> Layout:
        """The part of what is known that this policy takes over."""
        exact = layout.exact if self.takes_exact else 0
        return layout.limited(exact=exact, segments=self.takes_segments)

    def keep(self, stage: Stage) -> Int[Tensor, "kept"]:
        """Which of the stored tokens that are still active flow through this layer.

        At layer 0 all stored tokens are active. Returns positions, a subset of ``stage.active``;
        ``stage.active`` itself means no change.
        """
        raise NotImplementedError(f"{type(self).__name__}.keep")

    def ranks_by_deviation(self, layer: int) -> bool:
        """Whether `keep` asks for the deviation at ``layer`` (its projections are counted)."""
        return False

    def feed(self, stage: Stage) -> Int[Tensor, "some"] | None:
        """Rows of this layer that run the FFN, sorted; None is all."""
        return None

    def publish(self, stage: Stage) -> Bool[Tensor, "group row"] | None:
        """Which rows replace the reused K/V of each group; None is all."""
        return None

    def describe(self) -> str:
        """Name and the hyper-parameters that are not default, as the parser reads them."""
        parts = [self.name or type(self).__name__]
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                parts.append(f"{field.name}={_show(value)}")
        return ":".join(parts)


def fraction(value: float, name: str) -> None:
    """Raise ValueError unless ``value`` lies between 0 and 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError(f"{name} must be between 0 and 1, not {value!r}")


def count(value: int, name: str, least: int = 0) -> None:
    """Raise ValueError unless ``value`` is a whole number from ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number from {least}, not {value!r}")


def _show(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    short = f"{value:g}"
    return short if float(short) == value else repr(value)
