"""The gate before a server: the policy beside dense on a few prompts, against a limit."""

import hashlib
import logging
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, Protocol

import msgspec
import torch

from redknot.errors import InputError
from redknot.evaluation.data import Row
from redknot.evaluation.report import PolicyReport
from redknot.evaluation.run import EvalSettings, evaluate
from redknot.evaluation.summary import summarise
from redknot.execution import ExecutionSettings
from redknot.execution.session import Session
from redknot.heads import HeadMap
from redknot.recovery import Policy
from redknot.recovery.policies import Dense, Prefix
from redknot.version import __version__

ANSWER_TOKENS = 16
"Of dense's greedy answer, along which both are compared."

_Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
_log = logging.getLogger(__name__)


class GateLimits(Protocol):
    """What is measured and what must be reached; `redknot.engine.config.GateConfig` is one."""

    @property
    def agreement(self) -> float:
        """Least mean agreement of top tokens."""

    @property
    def prompts(self) -> int:
        """How many prompts are measured."""


class GateFigures(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was measured, as means over prompts."""

    prompts: int
    agreement: _Share
    kl: float
    "KL(dense || policy) in nats."
    floor_agreement: _Share
    "Of dense with itself through another kernel path."
    floor_kl: float
    flops_share: float
    seconds: float
    "That the measurement took."


@dataclass(frozen=True, kw_only=True, slots=True)
class GateResult:
    """The verdict on a policy."""

    limit: float
    figures: GateFigures | None
    "None where the policy's answers are dense's own: there was nothing to measure."
    cached: bool = False
    "Read from an earlier run of the same weights, map, policy and data."

    @property
    def passed(self) -> bool:
        """Whether the limit is reached; a KL that is no number (broken logits) never passes."""
        found = self.figures
        return found is None or (found.agreement >= self.limit and math.isfinite(found.kl))

    @property
    def summary(self) -> str:
        """One line with the figures."""
        found = self.figures
        if found is None:
            return "nothing to measure: the answers are dense's own"
        sign = ">=" if found.agreement >= self.limit else "<"
        return (
            f"agreement {_short(found.agreement, self.limit)} {sign} {self.limit:g}"
            f" over {found.prompts} prompts, KL {max(found.kl, 0):.3f}"  # below 0 by rounding alone
            f" (dense with itself {found.floor_agreement:.2f}, KL {max(found.floor_kl, 0):.3f})"
        )


class _Stored(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file of the cache."""

    format: Literal["redknot-gate-1"] = "redknot-gate-1"
    key: str
    figures: GateFigures
    checksum: str
    "Of key and figures."


def run_gate(
    session: Session,
    policy: Policy,
    head_map: HeadMap | None,
    rows: Sequence[Row],
    limits: GateLimits,
    *,
    cache_folder: Path | None,
) -> GateResult:
    """Measure ``policy`` beside dense on the first ``limits.prompts`` of ``rows`` that fit.

    Segments are stored before they are measured, and the planner has no say: this is the policy
    itself. Store and known beginnings of ``session`` stay as they are. Dense and prefix pass
    without a run. Random weights are measured like any others: the verdict is about the arithmetic
    and says nothing of answers. Local windows longer than the prompts hide nothing in them, so a
    head map is only tried as far as its windows are shorter than ``rows``. With a ``cache_folder``
    the figures of an earlier run on the same ground are taken; the limit is no part of that ground.
    `InputError` where no row fits the model's context or the policy lacks its head map.
    """
    if policy in (Dense(), Prefix()):
        return GateResult(limit=limits.agreement, figures=None)
    if policy.needs_head_map and head_map is None:
        raise InputError(f"policy {policy.name} needs a head map")
    if limits.prompts < 1:
        raise InputError("the gate needs 1 prompt or more")
    key = _key(session, policy, head_map, rows, limits.prompts)
    place = None if cache_folder is None else cache_folder / f"{key}.json"
    figures = None if place is None else _read(place, key)
    if figures is not None:
        return GateResult(limit=limits.agreement, figures=figures, cached=True)
    figures = _measure(session, policy, head_map, rows, limits.prompts)
    if place is not None:
        _write(place, key, figures)
    return GateResult(limit=limits.agreement, figures=figures)


def default_cache_folder() -> Path | None:
    """Where results are kept between starts; None for a user without a home."""
    try:
        return Path.home() / ".cache" / "redknot" / "gate"
    except RuntimeError:
        return None


def _measure(
    session: Session, policy: Policy, head_map: HeadMap | None, rows: Sequence[Row], prompts: int
) -> GateFigures:
    start = time.perf_counter()
    own = Session(session.model, session.template, settings=_without_pool(session.settings))
    settings = EvalSettings(
        limit=prompts,
        max_tokens=session.model.adapter.context_length,
        max_answer_chars=max(len(row.answers[0]) for row in rows),
        answer_tokens=ANSWER_TOKENS,
        answers=False,
        timing=False,
    )
    results = evaluate(own, rows, [Dense(), policy], head_map, settings)
    report = summarise(session.model.name, [one for some in results for one in some], {}, {})
    agreement, kl = _means(report.policies[1])
    floor_agreement, floor_kl = _means(report.floor)
    return GateFigures(
        prompts=report.n,
        agreement=agreement,
        kl=kl,
        floor_agreement=floor_agreement,
        floor_kl=floor_kl,
        flops_share=report.policies[1].flops_share,
        seconds=time.perf_counter() - start,
    )


def _means(found: PolicyReport | None) -> tuple[float, float]:
    """Agreement and KL."""
    if found is None or found.agreement is None or found.kl is None:
        raise RuntimeError("an evaluation without fidelity")
    return found.agreement.mean, found.kl.mean


def _key(
    session: Session, policy: Policy, head_map: HeadMap | None, rows: Sequence[Row], prompts: int
) -> str:
    """Digest of all that shapes the figures."""
    space, device = session.namespace, session.model.adapter.device
    tokenizer = session.model.tokenizer
    ground = (
        (__version__, str(torch.__version__)),
        (space.weights, space.settings, space.rotary, space.dtype, space.anchor, space.state),
        (policy.describe(), "" if head_map is None else head_map.digest()),
        (rows, prompts, ANSWER_TOKENS),
        (repr(session.template), repr(_without_pool(session.settings)), _name(device)),
        (repr(tokenizer.chat_template), tokenizer.backend_tokenizer.to_str()),
    )
    return hashlib.sha256(msgspec.json.encode(ground)).hexdigest()


def _without_pool(settings: ExecutionSettings) -> ExecutionSettings:
    """With pages as they are needed: beside a server's pool there is no room for another."""
    return replace(settings, num_pages=None)


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _read(place: Path, key: str) -> GateFigures | None:
    """What was stored under ``key``; whatever is wrong with the file is a miss."""
    try:
        stored = msgspec.json.decode(place.read_bytes(), type=_Stored)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    whole = stored.key == key and stored.checksum == _checksum(key, stored.figures)
    return stored.figures if whole else None


def _write(place: Path, key: str, figures: GateFigures) -> None:
    """Whole or not at all; without a place to write to the next start measures again."""
    stored = _Stored(key=key, figures=figures, checksum=_checksum(key, figures))
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent) as folder:
            part = Path(folder) / place.name
            part.write_bytes(msgspec.json.encode(stored))
            part.replace(place)
    except OSError as error:
        _log.warning("the gate's result was not kept: %s", error)


def _checksum(key: str, figures: GateFigures) -> str:
    return hashlib.sha256(key.encode() + msgspec.json.encode(figures)).hexdigest()


def _short(value: float, limit: float) -> str:
    """With as many digits as it takes to see on which side of ``limit`` it lies."""
    digits = next((d for d in range(2, 17) if (round(value, d) < limit) == (value < limit)), 17)
    return f"{value:.{digits}f}"
