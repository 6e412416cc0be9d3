"""What is measured beside dense: a policy, and the share of heads that see everything."""

from dataclasses import dataclass

from redknot.errors import InputError
from redknot.recovery import Policy, Windows
from redknot.recovery.policies import Dense, parse_policy


@dataclass(frozen=True, slots=True)
class Setting:
    """One policy under a random map of one global share."""

    policy: Policy
    share: float | None = None
    "None where the policy reads no map."

    def __post_init__(self) -> None:
        name = self.policy.describe()
        if self.share is not None and not 0 <= self.share <= 1:
            raise InputError(f"{name}: a global share of {self.share} is not between 0 and 1")
        if self.reads_map and self.share is None:
            raise InputError(f"{name} needs a global share: {name}@0.125")
        if not self.reads_map and self.share is not None:
            raise InputError(f"{name} reads no head map: leave @{self.share:g} out")

    @property
    def reads_map(self) -> bool:
        """Whether a head map changes what the policy does."""
        return self.policy.needs_head_map or self.policy.windows is not Windows.NONE

    @property
    def label(self) -> str:
        """As the parser reads it."""
        return self.policy.describe() + ("" if self.share is None else f"@{self.share:g}")


DENSE = Setting(Dense())


def later_rows(share: float | None) -> Setting:
    """A dense prefill whose later rows obey a map of ``share``; dense without one."""
    return DENSE if share is None else Setting(Dense(windows=Windows.DECODE), share)


def parse_settings(text: str) -> list[Setting]:
    """Comma-separated ``POLICY`` or ``POLICY@SHARE``, dense left out; `InputError` if one stands
    twice."""
    settings = [parse_setting(part) for part in text.split(",") if part.strip()]
    labels = [setting.label for setting in settings]
    if len(set(labels)) != len(labels):
        raise InputError(f"a setting stands twice in {text!r}")
    return [setting for setting in settings if setting != DENSE]


def parse_setting(text: str) -> Setting:
    """``POLICY`` or ``POLICY@SHARE``, as a label says it."""
    spec, at, share = text.partition("@")
    return Setting(parse_policy(spec), as_share(share) if at else None)


def as_share(text: str) -> float:
    """A number that names a share of heads."""
    try:
        return float(text)
    except ValueError as error:
        raise InputError(f"{text!r} is no global share") from error
