"""Chunks by content tile their text, keep their sizes and are found again elsewhere."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from tests.tiny import random_ids

from redknot.segments.chunking import WIDTH, ChunkSizes, chunk

SMALL = ChunkSizes(smallest=16, average=48, largest=160)
SIZES = st.lists(st.integers(WIDTH, 200), min_size=3, max_size=3).map(
    lambda three: ChunkSizes(
        **dict(zip(("smallest", "average", "largest"), sorted(three), strict=True))
    )
)
TEXTS = st.one_of(
    st.lists(st.integers(0, 50_000), max_size=400),
    st.lists(st.integers(0, 1), max_size=400),  # long repeats
    st.integers(0, 3000).map(lambda count: [7] * count),
    st.tuples(st.integers(0, 2000), st.integers(0, 99)).map(lambda two: random_ids(*two).tolist()),
)


@settings(max_examples=100, deadline=None)
@given(TEXTS, SIZES)
def test_chunks_tile_a_beginning_within_their_sizes(text: list[int], sizes: ChunkSizes) -> None:
    ids = torch.tensor(text, dtype=torch.int64)
    chunks = chunk(ids, sizes)
    end = 0
    for start, stop in chunks:
        assert start == end
        assert sizes.smallest <= stop - start <= sizes.largest
        end = stop
    assert 0 <= len(ids) - end < sizes.largest
    assert chunk(ids.clone(), sizes) == chunks


@pytest.mark.parametrize("length", range(2 * WIDTH + 2))
def test_texts_of_any_short_length_are_cut(length: int) -> None:
    """Around the width that a border depends on, too."""
    for start, stop in chunk(random_ids(length), ChunkSizes(smallest=16, average=20, largest=32)):
        assert 0 <= start < stop <= length


@settings(max_examples=30, deadline=None)
@given(TEXTS, st.integers(0, 400), SIZES)
def test_what_is_appended_changes_no_earlier_chunk(
    text: list[int], kept: int, sizes: ChunkSizes
) -> None:
    whole = chunk(torch.tensor(text, dtype=torch.int64), sizes)
    beginning = chunk(torch.tensor(text[:kept], dtype=torch.int64), sizes)
    assert whole[: len(beginning)] == beginning


def contents(ids: torch.Tensor, sizes: ChunkSizes = SMALL) -> list[tuple[int, ...]]:
    return [tuple(ids[start:stop].tolist()) for start, stop in chunk(ids, sizes)]


@pytest.mark.parametrize("beginning", [1, 2, 15, 16, 17, 63, 64, 100, 333])
@pytest.mark.parametrize("seed", range(5))
def test_the_same_text_behind_another_beginning_has_mostly_the_same_chunks(
    beginning: int, seed: int
) -> None:
    text = random_ids(4000, seed)
    alone = contents(text)
    behind = set(contents(torch.cat([random_ids(beginning, seed + 50), text])))
    found = sum(len(piece) for piece in alone if piece in behind)
    assert found > 0.75 * 4000


@pytest.mark.parametrize("seed", range(5))
def test_a_change_in_the_middle_spoils_only_chunks_near_it(seed: int) -> None:
    text = random_ids(4000, seed)
    changed = text.clone()
    changed[2000:2003] += 300
    again = set(contents(changed))
    lost = sum(len(piece) for piece in contents(text) if piece not in again)
    assert 0 < lost < 0.25 * 4000


def test_other_texts_have_no_chunk_in_common() -> None:
    """Else the tests above could not fail."""
    assert not set(contents(random_ids(4000, 1))) & set(contents(random_ids(4000, 2)))


def test_chunks_of_random_text_have_about_the_average_size() -> None:
    text = random_ids(60_000, 3)
    sizes = ChunkSizes()
    lengths = [stop - start for start, stop in chunk(text, sizes)]
    # Gaps behind the smallest size are geometric, so their mean over n chunks is off by
    # (average - smallest) / sqrt(n), about 13 of 256 tokens; five times that is never reached.
    assert abs(sum(lengths) / len(lengths) - sizes.average) < 65
    assert len(set(lengths)) > 50


@pytest.mark.parametrize("sizes", [(15, 20, 30), (64, 63, 100), (64, 100, 99)])
def test_sizes_that_do_not_grow_are_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="grow"):
        ChunkSizes(smallest=sizes[0], average=sizes[1], largest=sizes[2])


PARAGRAPHS = st.lists(
    st.tuples(st.integers(1, 300), st.integers(0, 9)).map(lambda two: random_ids(*two).tolist()),
    min_size=1,
    max_size=8,
)


def joined(paragraphs: list[list[int]]) -> tuple[torch.Tensor, list[int]]:
    """One text, and a break behind each paragraph."""
    breaks, ids = [], []
    for paragraph in paragraphs:
        ids += paragraph
        breaks.append(len(ids))
    return torch.tensor(ids, dtype=torch.int64), breaks


@settings(max_examples=150, deadline=None)
@given(PARAGRAPHS, PARAGRAPHS, PARAGRAPHS, SIZES)
def test_a_document_keeps_its_inner_borders_wherever_it_stands(
    document: list[list[int]], before: list[list[int]], behind: list[list[int]], sizes: ChunkSizes
) -> None:
    """From its first to its last long paragraph; short ones outside may join their neighbours."""
    text, breaks = joined([*before, *document, *behind])
    shift = sum(map(len, before))
    alone, own = joined(document)
    long = [index for index, one in enumerate(document) if len(one) >= sizes.smallest]
    first, last = ([0, *own][long[0]], own[long[-1]]) if long else (0, 0)
    wanted = [one for one in chunk(alone, sizes, own) if first <= one[0] < last]
    chunks = [(start - shift, stop - shift) for start, stop in chunk(text, sizes, breaks)]
    assert [one for one in chunks if first <= one[0] < last] == wanted
    assert not long or (wanted[0][0], wanted[-1][1] <= last) == (first, True)


@settings(max_examples=100, deadline=None)
@given(PARAGRAPHS, SIZES, st.booleans())
def test_with_breaks_chunks_leave_out_only_what_is_short(
    paragraphs: list[list[int]], sizes: ChunkSizes, ends: bool
) -> None:
    """A long paragraph begins and ends a chunk; whole if it is no longer than the largest."""
    ids, breaks = joined(paragraphs)
    chunks = chunk(ids, sizes, breaks if ends else breaks[:-1])
    end = 0
    for start, stop in chunks:
        assert end <= start
        assert sizes.smallest <= stop - start <= sizes.largest
        assert start - end < 2 * sizes.smallest  # a rest, and a lone short paragraph
        end = stop
    for paragraph, stop in zip(paragraphs, breaks, strict=True):
        if sizes.smallest <= len(paragraph) <= sizes.largest and (ends or stop < len(ids)):
            assert (stop - len(paragraph), stop) in chunks


def test_short_paragraphs_in_a_row_are_one_chunk_and_a_lone_one_is_none() -> None:
    lengths = [20, 100, 10, 12, 15, 100, 20]
    text, breaks = joined([random_ids(length).tolist() for length in lengths])
    sizes = ChunkSizes(smallest=32)
    assert chunk(text, sizes, breaks) == [(20, 120), (120, 157), (157, 257)]
