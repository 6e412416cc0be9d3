"""Prompts have exactly the wanted tokens, in the wanted places, and their state is found."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.bench.conftest import open_bench

from redknot.bench.context import Bench
from redknot.bench.maps import MapSettings
from redknot.bench.prompts import PromptShape, Request, Tokens
from redknot.errors import InputError
from redknot.heads.head_map import Phase
from redknot.segments import Span

BENCH = open_bench()


@given(tokens=st.integers(104, 5000), segment=st.integers(1, 2048), seed=st.integers(0, 9))
def test_a_prompt_has_its_tokens_where_they_belong(tokens: int, segment: int, seed: int) -> None:
    shape = PromptShape(tokens=tokens, segment_tokens=segment)
    request = Tokens(BENCH.session, seed).request(shape)
    assert len(request.token_ids) == tokens
    anchor = BENCH.session.namespace.anchor
    assert request.token_ids[: len(anchor)] == anchor
    lengths = [stop - start for start, stop in request.spans]
    assert tuple(lengths) == shape.segments
    assert lengths[:-1] == [segment] * (len(lengths) - 1)
    assert 1 <= lengths[-1] <= segment
    assert request.spans[0][0] == 39
    assert all(one[1] == two[0] for one, two in zip(request.spans, request.spans[1:], strict=False))
    assert request.spans[-1][1] == tokens - 64
    assert request.probe == (tokens - 64, tokens)
    behind = set(request.token_ids[len(anchor) :])
    assert not behind & {*BENCH.session.model.end_token_ids, 256, 257}
    assert max(behind) < 300


def test_a_prompt_is_built_from_a_list_of_ids_with_spans_and_probe() -> None:
    request = Request((5, 6, 7, 8, 9), ((1, 2), (2, 4)), (4, 5))
    prompt = request.prompt(list(request.token_ids))
    assert prompt.token_ids.tolist() == [5, 6, 7, 8, 9]
    assert prompt.spans == (Span(1, 2), Span(2, 4))
    assert prompt.probe == (4, 5)
    assert request.segments() == [[6], [7, 8]]


def test_what_was_built_is_found_in_every_order(bench: Bench) -> None:
    shape = PromptShape(tokens=400, segment_tokens=90)
    request = bench.ready(shape)
    assert not bench.store.keys()
    assert bench.build(request) > 0
    tokens, orders, beginnings = Tokens(bench.session, 7), set(), set()
    for _ in range(4):
        other = tokens.around(request.segments(), shape)
        lookup = bench.session.look_up(other.prompt(list(other.token_ids)))
        assert not lookup.missing
        assert len(other.token_ids) == 400
        orders.add(other.spans)
        beginnings.add((other.token_ids[:39], other.token_ids[-64:]))
    assert len(beginnings) == 4
    assert len(orders) > 1


def test_a_seed_is_a_prompt(bench: Bench) -> None:
    shape = PromptShape(tokens=300)
    one, same, other = (Tokens(bench.session, seed).request(shape) for seed in (1, 1, 2))
    assert one == same
    assert one != other


@pytest.mark.parametrize("settings", [{"tokens": 103}, {"tokens": 500, "segment_tokens": 0}])
def test_a_shape_that_cannot_be_is_refused(settings: dict[str, int]) -> None:
    with pytest.raises(InputError):
        PromptShape(**settings)


@pytest.mark.parametrize("share", [0.0, 0.125, 0.5, 1.0])
def test_a_random_map_has_its_share_window_and_sink(share: float, bench: Bench) -> None:
    head_map = MapSettings(window=77, sink=3).random_map(bench.session.executor.shapes, share)
    for phase in Phase:
        assert head_map.global_share(phase) == share
        local = [rule for row in head_map.rules(phase) for rule in row if rule.window]
        assert {(rule.window, rule.sink) for rule in local} <= {(77, 3)}
    assert head_map.fit(bench.session.model.adapter) == head_map


def test_pages_are_there_before_the_clock_runs(bench: Bench) -> None:
    storage = bench.session.executor.storage
    request = bench.ready(PromptShape(tokens=400, segment_tokens=90))
    planes = storage.planes["key"]
    bench.build(request)
    assert planes is storage.planes["key"]
    assert storage.pool.num_pages == 4 * 2 * -(-(400 + 16) // 16)
