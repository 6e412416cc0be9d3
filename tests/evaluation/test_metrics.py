"""Answer scores on known cases, and what an interval must be."""

import numpy as np
import pytest

from redknot.evaluation.metrics import answer_words, bootstrap, exact_match, f1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The  Red, Stone!", ["red", "stone"]),
        ("an apple a day", ["apple", "day"]),
        ("theatre", ["theatre"]),
        ("well-known", ["well", "known"]),
        ("The", []),
        ("", []),
        ("Žižkov", ["žižkov"]),
    ],
)
def test_case_punctuation_and_articles_do_not_count(text: str, words: list[str]) -> None:
    assert answer_words(text) == words


@pytest.mark.parametrize(
    ("answer", "golds", "score"),
    [
        ("red stone", ["red stone"], 1),
        ("the Red stone.", ["a red stone"], 1),
        ("red", ["red stone"], 2 / 3),
        ("red red", ["red stone"], 1 / 2),
        ("red red", ["red red stone"], 4 / 5),
        ("blue", ["red stone"], 0),
        ("", ["red stone"], 0),
        ("stone", ["red stone", "stone"], 1),
    ],
)
def test_f1_counts_common_words_of_the_best_gold(
    answer: str, golds: list[str], score: float
) -> None:
    assert f1(answer, golds) == pytest.approx(score)


def test_exact_match_is_equality_after_normalisation_with_any_gold() -> None:
    assert exact_match("The Red stone!", ["blue", "red stone"]) == 1
    assert exact_match("red stones", ["blue", "red stone"]) == 0
    assert exact_match("stone red", ["red stone"]) == 0


@pytest.mark.parametrize("seed", range(5))
def test_an_interval_contains_the_mean_and_lies_within_the_data(seed: int) -> None:
    values = np.random.default_rng(seed).exponential(size=30).tolist()
    found = bootstrap(values)
    assert found.mean == pytest.approx(np.mean(values))
    assert min(values) <= found.low < found.mean < found.high <= max(values)


def test_an_interval_shrinks_with_the_root_of_the_number_of_prompts() -> None:
    widths = []
    for count in (25, 400):
        found = bootstrap(([0.0] * 4 + [1.0]) * (count // 5))
        widths.append(found.high - found.low)
    # 16 times the prompts, a quarter of the width; 2000 resamples and steps of 1/25 blur it
    assert widths[0] / widths[1] == pytest.approx(4, rel=0.25)


def test_an_interval_covers_the_true_mean_about_as_often_as_it_says() -> None:
    draws = np.random.default_rng(0).normal(size=(200, 50))
    intervals = [bootstrap(draw.tolist(), resamples=300) for draw in draws]
    covered = sum(one.low <= 0 <= one.high for one in intervals)
    # 95 % of 200 is 190, its binomial deviation 3; percentile intervals are a little short
    assert 175 <= covered <= 199


def test_constants_and_single_values_have_no_width() -> None:
    for values in ([0.3] * 7, [2.5]):
        found = bootstrap(values)
        assert found.low == found.high == pytest.approx(found.mean)
        assert found.mean == pytest.approx(values[0])


def test_an_interval_is_the_same_every_time() -> None:
    values = np.random.default_rng(1).normal(size=20).tolist()
    assert bootstrap(values) == bootstrap(values)
