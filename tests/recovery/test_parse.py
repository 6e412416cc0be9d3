"""Policies by name: what the parser reads, what it refuses, and what constructors refuse."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redknot.errors import InputError
from redknot.recovery import Policy, Windows
from redknot.recovery.policies import (
    POLICIES,
    CacheBlend,
    Epic,
    LayerDrop,
    Question,
    QuestionDrop,
    RedKnot,
    parse_policies,
    parse_policy,
)

SHARES = st.floats(0, 1)
COUNTS = st.integers(0, 10**6)
WINDOWS = st.sampled_from(Windows)
ANY = st.one_of(
    st.builds(Question, share=SHARES, windows=WINDOWS),
    st.builds(Epic, k=COUNTS),
    st.builds(CacheBlend, share=SHARES, check_layer=st.integers(1, 99)),
    st.builds(QuestionDrop, first=st.just(1.0), then=SHARES, until=SHARES, windows=WINDOWS),
    st.builds(LayerDrop, then=SHARES),
    st.builds(
        RedKnot,
        dense_until=COUNTS,
        mass=SHARES,
        share=SHARES,
        recent=COUNTS,
        signal=st.sampled_from(["output", "question"]),
        publish_all=st.booleans(),
        guard=st.booleans(),
        windows=WINDOWS,
    ),
)


@pytest.mark.parametrize("name", POLICIES)
def test_every_name_gives_its_policy_with_defaults(name: str) -> None:
    policy = parse_policy(f" {name} ")
    assert type(policy) is POLICIES[name]
    assert policy == POLICIES[name]()
    assert policy.describe() == name


@settings(deadline=None)
@given(policy=ANY)
def test_what_a_policy_describes_is_read_back(policy: Policy) -> None:
    assert parse_policy(policy.describe()) == policy


def test_options_are_read() -> None:
    assert parse_policy("question_drop:first=0.5:then=0.1") == QuestionDrop(first=0.5, then=0.1)
    assert parse_policy("redknot:guard=true:signal=question:windows=all") == RedKnot(
        guard=True, signal="question", windows=Windows.ALL
    )
    assert parse_policies("epic:k=8, epic:k=16") == [Epic(k=8), Epic(k=16)]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("dens", "dens"),
        ("", "unknown policy"),
        ("Question", "Question"),
        ("question:shard=0.2", "shard"),
        ("dense:k=4", "'k=4'"),
        ("question:share", "share"),
        ("question:", "no option ''"),
        ("question:share=", "share="),
        ("question:share=many", "share=many"),
        ("question:share=true", "share=true"),
        ("question:share=-0.1", "between 0 and 1"),
        ("question:share=1.01", "between 0 and 1"),
        ("question:share=nan", "between 0 and 1"),
        ("question:share=inf", "between 0 and 1"),
        ("question:share=0.1:share=0.2", "share"),
        ("question_drop:first=0.1:then=0.2", "only shrinks"),
        ("layer_drop:then=2", "between 0 and 1"),
        ("cacheblend:check_layer=0", "check_layer"),
        ("cacheblend:check_layer=1.5", "check_layer"),
        ("epic:k=-1", "k must be"),
        ("epic:k=1.5", "k=1.5"),
        ("redknot:recent=-1", "recent"),
        ("redknot:dense_until=-1", "dense_until"),
        ("redknot:mass=1.5", "mass"),
        ("redknot:signal=noise", "signal=noise"),
        ("redknot:guard=maybe", "guard=maybe"),
        ("redknot:windows=some", "windows=some"),
    ],
)
def test_a_mistake_is_refused_by_name(text: str, named: str) -> None:
    with pytest.raises(InputError, match=named):
        parse_policy(text)


@pytest.mark.parametrize("text", ["", " , ", "dense,dense", "epic,epic:k=64", "dense,dens"])
def test_a_bad_list_is_refused(text: str) -> None:
    with pytest.raises(InputError):
        parse_policies(text)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Question, {"share": 1.5}),
        (Question, {"share": -1e-9}),
        (Question, {"share": "0.2"}),
        (Question, {"share": True}),
        (Question, {"share": None}),
        (Question, {"share": float("nan")}),
        (Question, {"windows": "some"}),
        (QuestionDrop, {"first": 0.1}),
        (QuestionDrop, {"until": 1.5}),
        (LayerDrop, {"then": 1.5}),
        (CacheBlend, {"share": 2}),
        (CacheBlend, {"check_layer": 0}),
        (CacheBlend, {"check_layer": 1.5}),
        (CacheBlend, {"check_layer": True}),
        (Epic, {"k": -1}),
        (Epic, {"k": 1.5}),
        (Epic, {"k": True}),
        (RedKnot, {"share": 2}),
        (RedKnot, {"mass": -1}),
        (RedKnot, {"dense_until": -1}),
        (RedKnot, {"recent": -1}),
        (RedKnot, {"recent": 1.5}),
        (RedKnot, {"signal": "noise"}),
    ],
)
def test_a_hyper_parameter_out_of_range_is_a_value_error(
    kind: type[Policy], options: dict[str, Any]
) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - which one is the matter, not the words
        kind(**options)
