"""Select in Triton: the rank of the last score that is taken, digit by digit, then compaction."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from redknot.kernels.attend.triton import INTERPRETED

CHUNK = 1024 if INTERPRETED else 2048
"Scores that one program looks at."
BINS = 2048
"Values of a digit; three digits make a rank."


@triton.jit
def _ranks(scores, among, index, count, MASKED: tl.constexpr):
    """Unsigned integers in the order of the scores; 0 is no candidate, 1 is NaN."""
    inside = index < count
    score = tl.load(scores + index, mask=inside, other=0.0)
    bits = tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True)  # one zero
    flipped = tl.where(bits < 0, ~bits, bits | (-2147483647 - 1))
    rank = tl.where(score != score, 1, flipped).to(tl.uint32, bitcast=True)
    if MASKED:
        inside &= tl.load(among + index, mask=inside, other=0) != 0
    return tl.where(inside, rank, 0), inside


@triton.jit
def _extend(
    tallies, state, wanted, ABOVE: tl.constexpr, SHIFT: tl.constexpr, BINS: tl.constexpr
):  # fmt: skip
    """One more digit of the sought rank, and how many are still to be taken at or under it."""
    prefix = tl.full([], 0, tl.uint32)
    need = wanted
    if ABOVE < 32:
        prefix = tl.load(state).to(tl.uint32, bitcast=True)
        need = tl.load(state + 1)
    bins = tl.arange(0, BINS)
    above = tl.cumsum(tl.load(tallies + bins), 0, reverse=True)  # this bin and those above
    chosen = tl.sum((above >= need).to(tl.int32)) - 1
    need -= tl.sum(tl.where(bins == chosen + 1, above, 0))
    return (prefix << (ABOVE - SHIFT)) | chosen.to(tl.uint32), need


@triton.jit(do_not_specialize=["wanted", "count"])
def _tally(
    scores, among, tallies, state, wanted, count, ABOVE: tl.constexpr, SHIFT: tl.constexpr,
    BEFORE: tl.constexpr, BINS: tl.constexpr, MASKED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Count the next digit, from bit ABOVE down to SHIFT, of ranks that share the known ones."""
    rank, inside = _ranks(scores, among, tl.program_id(0) * CHUNK + tl.arange(0, CHUNK), count,
                          MASKED)  # fmt: skip
    if ABOVE < 32:
        prefix, need = _extend(tallies, state, wanted, BEFORE, ABOVE, BINS)
        tl.store(state + 2, prefix.to(tl.int32, bitcast=True))
        tl.store(state + 3, need)
        tallies += BINS
        inside &= (rank >> ABOVE) == prefix
    digit = ((rank >> SHIFT) & ((1 << (ABOVE - SHIFT)) - 1)).to(tl.int32)
    tl.atomic_add(tallies + digit, 1, mask=inside, sem="relaxed")


@triton.jit(do_not_specialize=["count"])
def _count(
    scores, among, tallies, state, counts, count,
    BINS: tl.constexpr, MASKED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    last, need = _extend(tallies, state, 0, 10, 0, BINS)
    tl.store(state + 2, last.to(tl.int32, bitcast=True))
    tl.store(state + 3, need)
    rank, inside = _ranks(scores, among, chunk * CHUNK + tl.arange(0, CHUNK), count, MASKED)
    tl.store(counts + chunk * 2, tl.sum((inside & (rank > last)).to(tl.int32)))
    tl.store(counts + chunk * 2 + 1, tl.sum((inside & (rank == last)).to(tl.int32)))


@triton.jit(do_not_specialize=["count"])
def _compact(
    scores, among, state, counts, tokens, count,
    MASKED: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    last = tl.load(state).to(tl.uint32, bitcast=True)
    need = tl.load(state + 1)
    before = tl.arange(0, CHUNKS)
    above = tl.sum(tl.load(counts + before * 2, mask=before < chunk, other=0))
    equal = tl.sum(tl.load(counts + before * 2 + 1, mask=before < chunk, other=0))
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    rank, inside = _ranks(scores, among, index, count, MASKED)
    same = inside & (rank == last)
    taken = same & (equal + tl.cumsum(same.to(tl.int32), 0) <= need)
    taken |= inside & (rank > last)
    slot = above + tl.minimum(equal, need) + tl.cumsum(taken.to(tl.int32), 0) - 1
    tl.store(tokens + slot, index.to(tl.int64), mask=taken)


def select_top(scores: Tensor, count: int, among: Tensor | None) -> Tensor:
    """As `redknot.kernels.select.select_top`."""
    size, device = len(scores), scores.device
    tokens = torch.empty(count, dtype=torch.int64, device=device)
    chunks = triton.cdiv(size, CHUNK)
    tallies = torch.zeros(3 * BINS + 8, dtype=torch.int32, device=device)
    state = tallies[3 * BINS :]  # known digits and what is left to take, after each round
    counts = torch.empty(chunks, 2, dtype=torch.int32, device=device)
    ranked = scores.float().contiguous()
    mask = ranked if among is None else among.view(torch.uint8).contiguous()
    common = {"MASKED": among is not None, "CHUNK": CHUNK, "num_warps": 8}
    for turn, (before, above, shift) in enumerate(((32, 32, 21), (32, 21, 10), (21, 10, 0))):
        done = max(0, turn - 1)
        _tally[(chunks,)](
            ranked, mask, tallies[done * BINS :], state[done * 2 :], count, size,
            ABOVE=above, SHIFT=shift, BEFORE=before, BINS=BINS, **common,
        )  # fmt: skip
    _count[(chunks,)](
        ranked, mask, tallies[2 * BINS :], state[4:], counts, size, BINS=BINS, **common
    )
    _compact[(chunks,)](
        ranked, mask, state[6:], counts, tokens, size,
        **common, CHUNKS=triton.next_power_of_2(chunks),
    )  # fmt: skip
    return tokens
