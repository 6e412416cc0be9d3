"""Answer scores and bootstrap intervals."""

import re
import string
from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np


class Interval(msgspec.Struct, frozen=True):
    """A mean over prompts with its 95 % bootstrap interval."""

    mean: float
    low: float
    high: float


def bootstrap(values: Sequence[float], resamples: int = 2000) -> Interval:
    """Mean of ``values`` (one a prompt) and the percentile interval over resampled prompts."""
    data = np.asarray(values, dtype=np.float64)
    picks = np.random.default_rng(0).integers(0, len(data), (resamples, len(data)))
    means = data[picks].mean(1)
    low, high = np.percentile(means, [2.5, 97.5])
    return Interval(float(data.mean()), float(low), float(high))


def answer_words(text: str) -> list[str]:
    """Lower-case words of an answer without punctuation and articles (SQuAD's normalisation)."""
    plain = "".join(" " if char in string.punctuation else char for char in text.lower())
    return re.sub(r"\b(a|an|the)\b", " ", plain).split()


def f1(answer: str, golds: Sequence[str]) -> float:
    """Best word F1 of ``answer`` against any gold answer."""
    return max(_f1(answer_words(answer), answer_words(gold)) for gold in golds)


def exact_match(answer: str, golds: Sequence[str]) -> float:
    """1 if ``answer`` equals a gold answer after normalisation."""
    return float(any(answer_words(answer) == answer_words(gold) for gold in golds))


def _f1(answer: list[str], gold: list[str]) -> float:
    common = sum((Counter(answer) & Counter(gold)).values())
    if not common:
        return 0.0
    return 2 * common / (len(answer) + len(gold))
