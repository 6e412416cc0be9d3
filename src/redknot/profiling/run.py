"""Profiling a model: from question-answering rows to a head map and a report."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import torch
from jaxtyping import Float
from torch import Tensor
from tqdm.auto import tqdm

from redknot.errors import InputError
from redknot.evaluation.data import Row
from redknot.evaluation.run import EvalSettings, prepare
from redknot.execution.session import Session
from redknot.heads import HeadMap
from redknot.heads.head_map import Measurement
from redknot.kernels.attend import Reach
from redknot.profiling.ablation import Observation, observe
from redknot.profiling.quality import MapQuality, measure_maps
from redknot.profiling.shift import prefix_shift
from redknot.recovery.policies import Dense
from redknot.segments import Prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileSettings:
    """What is measured, and what map is made of it."""

    prompts: int = 16
    "Prompts of the scores."
    quality_prompts: int = 8
    "Further prompts that the maps are judged on; 0 leaves the report without."
    min_tokens: int = 2000
    max_tokens: int = 5200
    pad_tokens: tuple[int, ...] = (2000, 3000, 4500)
    method: Literal["ablation", "edge", "shift"] = "ablation"
    window: int = 256
    sink: int = 4
    global_share: float = 0.5
    decode_global_share: float = 0.5
    shares: tuple[float, ...] = (0.15, 0.3, 0.5)
    "Global shares that the report compares."
    windows: tuple[int, ...] = (256, 1024)
    "Windows that the report compares."

    def __post_init__(self) -> None:
        shares = (self.global_share, self.decode_global_share, *self.shares)
        if self.prompts < 2 or self.quality_prompts < 0:
            raise InputError("at least 2 prompts are needed, for two halves")
        if min(self.window, *self.windows) < 1 or self.sink < 0:
            raise InputError("windows must be 1 token or more, the sink 0 or more")
        if not all(0 <= share <= 1 for share in shares):
            raise InputError("global shares must be between 0 and 1")


class ProfileReport(msgspec.Struct, frozen=True, kw_only=True):
    """What profiling found."""

    model: str
    method: str
    window: int
    num_prompts: int
    scores: list[list[float]]
    split_half: float
    "Spearman rank correlation of the scores of two halves of the prompts."
    concentration: dict[str, float]
    "Share of the summed scores in the top 2, 10 % and 30 % of the groups."
    important_tokens: list[float]
    "By layer: union over query heads of the tokens that carry 90 % of the question's attention."
    important_tokens_per_head: list[float]
    maps: list[MapQuality]


def profile(
    session: Session, rows: Sequence[Row], settings: ProfileSettings
) -> tuple[HeadMap, ProfileReport]:
    """Score every group on ``settings.prompts`` prompts and make a map; judge maps on others."""
    wanted = settings.prompts + settings.quality_prompts
    choice = EvalSettings(
        limit=wanted,
        min_tokens=settings.min_tokens,
        max_tokens=settings.max_tokens,
        pad_tokens=settings.pad_tokens,
    )
    prompts = list(prepare(session, rows, choice))
    if len(prompts) < wanted:
        raise InputError(f"{wanted} prompts are needed, the data give {len(prompts)}")
    measured, judged = prompts[: settings.prompts], prompts[settings.prompts :]
    observations, scores = [], []
    for row, prompt in tqdm(measured, desc="profile", unit="prompt"):
        observation = observe_prompt(session, row, prompt, settings)
        observations.append(observation)
        scores.append(_signal(session, prompt, observation, settings.method))
    stacked = torch.stack(scores)
    mean = stacked.mean(0)
    quality = measure_maps(session, judged, mean, settings.shares, settings.windows, settings.sink)
    split = _rank_correlation(stacked[0::2].mean(0).flatten(), stacked[1::2].mean(0).flatten())
    report = ProfileReport(
        model=session.model.name,
        method=settings.method,
        window=settings.window,
        num_prompts=len(measured),
        scores=mean.tolist(),
        split_half=split,
        concentration=_concentration(mean.flatten()),
        important_tokens=_mean([one.important for one in observations]),
        important_tokens_per_head=_mean([one.important_per_head for one in observations]),
        maps=quality,
    )
    head_map = HeadMap.from_scores(
        mean,
        global_share=settings.global_share,
        window=settings.window,
        sink=settings.sink,
        decode_global_share=settings.decode_global_share,
        model=session.model.name,
        weights=session.weights,
        measured=Measurement(
            method=settings.method,
            window=settings.window,
            num_prompts=len(measured),
            data=tuple(sorted({row.dataset for row, _ in measured})),
            scores=tuple(tuple(round(x, 6) for x in layer) for layer in mean.tolist()),
            split_half=split,
        ),
    )
    return head_map, report


def observe_prompt(
    session: Session, row: Row, prompt: Prompt, settings: ProfileSettings
) -> Observation:
    """Signals of all groups on one prompt."""
    dense = session.prefill(prompt, Dense())
    gold = session.model.tokenizer(" " + row.answers[0].strip(), add_special_tokens=False)
    answer = torch.tensor(gold.input_ids[:16])
    end = dense.layout.context_end
    context = dense.cache.first(end)
    tail = torch.cat([prompt.token_ids[end:], answer[:-1]])
    reach = Reach(settings.window, settings.sink)
    return observe(session.model.adapter, context, tail, len(answer), reach)


def _signal(
    session: Session, prompt: Prompt, observation: Observation, method: str
) -> Float[Tensor, "layer group"]:
    if method == "edge":
        return observation.edge
    if method == "shift":
        return prefix_shift(session.model.adapter, prompt, session.tokeniser.anchor)
    return observation.ablation


def _rank_correlation(first: Tensor, second: Tensor) -> float:
    ranks = torch.stack([first.argsort().argsort(), second.argsort().argsort()]).double()
    return float(torch.corrcoef(ranks)[0, 1])


def _concentration(scores: Float[Tensor, "group"]) -> dict[str, float]:
    ordered = scores.sort(descending=True).values
    total = float(ordered.sum()) or 1.0
    counts = {"top 2": 2, "top 10 %": len(scores) // 10, "top 30 %": 3 * len(scores) // 10}
    return {name: float(ordered[: max(1, count)].sum()) / total for name, count in counts.items()}


def _mean(values: list[Tensor]) -> list[float]:
    return [float(x) for x in torch.stack(values).mean(0)]
