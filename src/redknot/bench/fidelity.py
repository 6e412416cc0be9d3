"""What a speed is worth: the agreement that `redknot eval` measured for the same policy."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from redknot.bench.setting import Setting
from redknot.errors import InputError
from redknot.evaluation.metrics import Interval
from redknot.evaluation.report import EvalReport

NOT_MEASURED = "not measured"
SHARE_ROUNDING = 0.006
"Half a group of the smallest model measured so far (90 groups): maps have whole groups."


class Fidelity(msgspec.Struct, frozen=True):
    """Means and 95 % intervals of one report."""

    agreement: Interval
    exact_match: Interval | None
    n: int
    "Prompts."


@dataclass(frozen=True, slots=True)
class FidelityReports:
    """Reports by the name of what they measured."""

    reports: dict[str, EvalReport]

    @classmethod
    def read(cls, paths: Sequence[Path]) -> "FidelityReports":
        """Reports that `redknot eval --json` wrote; `InputError` for any other file."""
        found: dict[str, EvalReport] = {}
        for path in paths:
            report = _read(path)
            name = report.model if report.model not in found else f"{report.model} ({path})"
            found[name] = report
        return cls(found)

    def of(self, setting: Setting) -> dict[str, Fidelity | None]:
        """What each report says of ``setting``; None where it has not measured it."""
        return {name: _find(report, setting) for name, report in self.reports.items()}


def _read(path: Path) -> EvalReport:
    try:
        return msgspec.json.decode(path.read_bytes(), type=EvalReport)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error
    except msgspec.DecodeError as error:
        raise InputError(f"{path}: not a report of redknot eval: {error}") from error


def _find(report: EvalReport, setting: Setting) -> Fidelity | None:
    if not _same_share(report.settings.get("global_share", ""), setting):
        return None
    for policy in report.policies:
        if policy.name == setting.policy.describe() and policy.agreement is not None:
            return Fidelity(policy.agreement, policy.exact_match, report.n)
    return None


def _same_share(measured: str, setting: Setting) -> bool:
    """Whether a report's PREFILL/DECODE shares are the setting's in the phases that it reads."""
    if setting.share is None:
        return True
    try:
        prefill, decode = (float(part) for part in measured.split("/"))
    except ValueError:
        return False
    policy, shares = setting.policy, []
    if policy.needs_head_map or policy.windows.on_context:
        shares.append(prefill)
    if policy.windows.on_decode:
        shares.append(decode)
    return all(abs(share - setting.share) <= SHARE_ROUNDING for share in shares)
