"""The issue's table: each target, what was reached, and whether that is enough."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp, log

from .prefill import BACKENDS, DENSE, SPEEDUP_CLAIMED, TWO_CALLS
from .record import Record

WITHIN_TWO_CALLS = {8192: 1.25, 32768: 1.12, 131072: 1.06}


@dataclass(frozen=True, slots=True)
class Target:
    """One line of the table."""

    what: str
    goal: str
    reached: str
    met: bool | None
    "None: no target but information."


class _Table:
    """Records by operation, field of the shape, and implementation."""

    def __init__(self, records: Iterable[Record]) -> None:
        self._records = [record for record in records if record.usable or record.kind == "count"]

    def shapes(self, op: str, *wanted: str) -> list[str]:
        """Shapes of ``op`` that have all ``wanted`` fields."""
        found = [r.shape for r in self._records if r.op == op and r.kind != "extrapolated"]
        return [s for s in dict.fromkeys(found) if set(wanted) <= set(s.split())]

    def fastest(self, op: str, shape: str, impls: Sequence[str]) -> Record | None:
        """The best of some implementations."""
        found = [
            r for r in self._records
            if (r.op, r.shape) == (op, shape) and r.impl in impls and r.kind != "extrapolated"
        ]  # fmt: skip
        return min(found, key=lambda r: r.median_us, default=None)

    def over(
        self, op: str, shape: str, slow: Sequence[str], fast: Sequence[str]
    ) -> tuple[float, str] | None:
        """Time of the best of ``slow`` over that of the best of ``fast``, and which they were."""
        above, below = self.fastest(op, shape, slow), self.fastest(op, shape, fast)
        if above is None or below is None:
            return None
        return above.median_us / below.median_us, f"{above.impl} over {below.impl}"


def judge(records: Sequence[Record]) -> list[Target]:
    """All targets, in the order of the issue's table."""
    table = _Table(records)
    return [
        *_prefill(table), *_gathered(table), *_score(table), *_decode(table), *_append(table),
        *_ffn(table), *_memory(records), *_article(table, records), *_cpu(table),
    ]  # fmt: skip


def show(targets: Iterable[Target]) -> str:
    """As a Markdown table."""
    words = {True: "yes", False: "NO", None: "-"}
    lines = ["| measure | target | reached | met |", "|---|---|---|---|"]
    lines += [f"| {t.what} | {t.goal} | {t.reached} | {words[t.met]} |" for t in targets]
    return "\n".join(lines)


def _prefill(table: _Table) -> Iterator[Target]:
    for op in ("prefill", "prefill graph"):
        for shape in table.shapes(op, "page=128"):
            window, tokens = _field(shape, "window"), _field(shape, "tokens")
            goal = WITHIN_TWO_CALLS.get(tokens, 1.15) if window == 256 else 1.15
            found = table.over(op, shape, BACKENDS, TWO_CALLS)
            yield _most(f"{op}, {shape}: best two-call time", goal, found)
            if op == "prefill" and window == 256:
                yield from _rivals(table, shape, tokens)
    for shape in table.shapes("prefill"):
        if "page=128" not in shape.split():
            found = table.over("prefill", shape, BACKENDS, TWO_CALLS)
            yield _note(f"prefill, {shape}: best two-call time", found)


def _rivals(table: _Table, shape: str, tokens: int) -> Iterator[Target]:
    name = f"prefill, {shape}:"
    yield _least(f"{name} FlexAttention", 1.3, table.over("prefill", shape, ["flex"], BACKENDS))
    found = table.over("prefill", shape, ["flex"], ["triton"])
    yield _least(f"{name} FlexAttention, pure Triton", 1.15, found)
    sparse = table.over("prefill", shape, ["fa4_block_sparse"], BACKENDS)
    yield _note(f"{name} FA4 block-sparse with sinks", sparse)
    if tokens == 32768:
        masked = table.over("prefill", shape, ["sdpa_masked"], BACKENDS)
        yield _least(f"{name} SDPA + mask", 25, masked)
    dense = table.over("prefill", shape, DENSE, BACKENDS)
    if tokens == 131072:
        yield _least(f"{name} best dense", 7, dense)
    else:
        yield _note(f"{name} best dense", dense)


def _gathered(table: _Table) -> Iterator[Target]:
    for shape in table.shapes("gathered"):
        ours = [f"{backend} gathered" for backend in BACKENDS]
        found = table.over("gathered", shape, ours, BACKENDS)
        yield _most(f"25 % gathered rows, {shape}: best of all rows", 0.32, found)
        found = table.over("gathered", shape, ["triton gathered"], ["triton"])
        yield _most(f"25 % gathered rows, {shape}: Triton, all rows", 0.32, found)


def _score(table: _Table) -> Iterator[Target]:
    for shape in table.shapes("score_select"):
        ours = ["score + select"]
        for name, base in (("reading the keys once", "reading the keys"),
                           ("copying the keys once", "copy of the keys")):  # fmt: skip
            found = table.over("score_select", shape, ours, [base])
            yield _most(f"score + select, {shape}: {name}", 2, found)
        for floor in ("products", "exp2"):
            found = table.over("score_select", shape, ours, [floor])
            yield _note(f"score + select, {shape}: floor of {floor}", found)
        found = table.over("score_select", shape, ["topk + sort"], ["select"])
        yield _note(f"select, {shape}: topk + sort", found)


def _decode(table: _Table) -> Iterator[Target]:
    copies = table.shapes("ceiling")
    copy = table.fastest("ceiling", copies[0], ["copy"]) if copies else None
    for shape in table.shapes("decode"):
        name = f"decode, {shape}:"
        ours = table.fastest("decode", shape, ["triton"])
        share = None
        if ours is not None and copy is not None and ours.tb_per_s and copy.tb_per_s:
            share = ours.tb_per_s / copy.tb_per_s, f"of {copy.tb_per_s:.2f} TB/s"
        yield _least(f"{name} visible bytes at copy speed", 0.75, share)
        goal = 1.05 if _field(shape, "requests") == 4 else 1.3
        per_head = table.over("decode", shape, ["fa3_per_head"], ["triton"])
        yield _least(f"{name} FA3 per head", goal, per_head)
        dense = table.over("decode", shape, ["fa3_dense_paged"], ["triton"])
        yield _least(f"{name} FA3 dense paged", 5, dense)


def _append(table: _Table) -> Iterator[Target]:
    for shape in table.shapes("append"):
        found = table.over("append", shape, ["triton"], ["copy"])
        yield _most(f"append + relocate, {shape}: copy of the same bytes", 1.3, found)


def _ffn(table: _Table) -> Iterator[Target]:
    for shape in table.shapes("gather_ffn"):
        found = table.over("gather_ffn", shape, ["gather_ffn"], ["contiguous rows"])
        yield _note(f"gather_ffn, {shape}: contiguous rows", found)


def _memory(records: Iterable[Record]) -> Iterator[Target]:
    for record in records:
        if record.op == "memory":
            met = record.check == "ok" if record.check else None
            yield Target(f"memory, {record.shape}", "exact at every step", record.notes, met)


def _article(table: _Table, records: Iterable[Record]) -> Iterator[Target]:
    points = []
    for shape in table.shapes("article"):
        found = table.over("article", shape, ["sdpa_masked"], BACKENDS)
        yield _note(f"dense + mask over ours, {shape}", found)
        if found is not None:
            points.append((_field(shape, "tokens"), found[0]))
    if points:
        reached = _crossing(sorted(points), SPEEDUP_CLAIMED)
        met = max(ratio for _, ratio in points) >= SPEEDUP_CLAIMED
        yield Target("article's claim over dense + mask", f"{SPEEDUP_CLAIMED}x", reached, met)
    for record in records:
        if record.kind == "extrapolated" and record.ratio is not None:
            text = f"{record.ratio:.1f}x, extrapolated; {record.notes}"
            yield Target(f"dense + mask, {record.shape}", "information", text, None)


def _cpu(table: _Table) -> Iterator[Target]:
    for shape in table.shapes("cpu"):
        for impl in ("torch", "torch, pages"):
            found = table.fastest("cpu", shape, [impl])
            if found is None or found.ratio is None:
                continue
            share = float(found.notes.rsplit(" ", 1)[1])
            text = f"{1 / found.ratio:.2f}x of dense SDPA"
            name = f"CPU, {shape}, {impl}: speed-up over ratio of visible pairs"
            yield _least(name, 0.6, (share, text))


def _crossing(points: list[tuple[int, float]], ratio: float) -> str:
    """At how many tokens a ratio is passed, between measured lengths by a power law."""
    text = ", ".join(f"{value:.1f}x at {tokens}" for tokens, value in points)
    for (low, below), (high, above) in pairwise(points):
        if below < ratio <= above:
            part = (log(ratio) - log(below)) / (log(above) - log(below))
            tokens = exp(log(low) + part * (log(high) - log(low)))
            return f"{text}; {ratio}x at about {tokens:.0f} tokens (between measured lengths)"
    return text


def _field(shape: str, name: str) -> int:
    fields = dict(field.split("=") for field in shape.split())
    return int(fields[name])


def _most(what: str, goal: float, found: tuple[float, str] | None) -> Target:
    met = found is not None and found[0] <= goal
    return Target(what, f"at most {goal}", _words(found), met)


def _least(what: str, goal: float, found: tuple[float, str] | None) -> Target:
    met = found is not None and found[0] >= goal
    return Target(what, f"at least {goal}", _words(found), met)


def _note(what: str, found: tuple[float, str] | None) -> Target:
    return Target(what, "information", _words(found), None)


def _words(found: tuple[float, str] | None) -> str:
    return "not measured" if found is None else f"{found[0]:.3f} ({found[1]})"
