"""Attention of gathered rows over pages: every backend against float64 over explicit sets."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tests.kernels.inputs import (
    DEVICE,
    DIMS,
    DTYPES,
    HEADS,
    LENGTHS,
    NAN,
    PAGE_SIZES,
    Pages,
    Request,
    choose,
    columns,
    place,
    plan_of,
    poisoned,
    shown,
)
from tests.kernels.truth import EXP, FAST_EXP, Truth, truth
from torch import Tensor

from redknot.kernels.attend import AttendPlan, Part, Reach, attend
from redknot.kernels.paging import PagedKV

REACHES = [
    Reach(),
    Reach(1),
    Reach(8, 4),
    Reach(4, 6),
    Reach(40, 16),
    Reach(horizon=24),
    Reach(16, 4, 40),
    Reach(24, 40, 60),
    Reach(64, 64),
    Reach(30, 4, 12),
    Reach(2**30),
    Reach(1000, 4, 5000),
    Reach(33),
    Reach(8, 200),
]
BLIND = [Reach(0), Reach(0, 3), Reach(0, 3, 10), Reach(horizon=0)]
KINDS = ["all", "chunk", "random", "single"]
FAST = ["torch", "triton"]
QUICK = (Phase.explicit, Phase.reuse, Phase.generate)  # shrinking takes minutes when interpreted


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """Random inputs of one call."""

    query: Tensor
    pages: Pages
    requests: Sequence[Request]
    exponential: float = EXP

    @classmethod
    def of(
        cls,
        requests: Sequence[Request],
        heads: tuple[int, int],
        dim: int = 32,
        *,
        impl: str = "triton",
        seed: int = 0,
        hold: str = "seen",
        dtype: torch.dtype = torch.float32,
        **options: object,
    ) -> "Case":
        bulk = dim in (64, 128, 256) and options.get("page_size", 16) % 32 == 0
        if impl == "triton" and bulk:
            options["junk"] = 1e4  # bulk reads take along what must be finite
        if impl == "torch":  # see the test of absent pages below
            hold, options["climbing"] = "all" if hold == "all" else "between", False
        pages = Pages.of(requests, heads[1], dim, seed=seed, hold=hold, dtype=dtype, **options)
        rows = sum(len(request.positions) for request in requests)
        generator = torch.Generator().manual_seed(seed + 1)
        query = torch.randn(rows, heads[0], dim, generator=generator).to(dtype)
        fast = impl == "torch" and dtype != torch.float32
        states = query.transpose(0, 1).to(DEVICE)
        return cls(states, pages, requests, FAST_EXP if fast else EXP)

    @property
    def scale(self) -> float:
        return self.query.shape[2] ** -0.5

    @property
    def truth(self) -> Truth:
        return truth(
            self.query, self.pages, self.requests, self.scale, exponential=self.exponential
        )

    def run(self, impl: str, **options: object) -> Tensor | tuple[Tensor, Tensor]:
        plan = plan_of(self.requests)
        with poisoned():
            return attend(self.query, self.pages.kv, plan, scale=self.scale, impl=impl, **options)

    def check(self, impl: str, **options: object) -> None:
        expected = self.truth
        expected.check(*self.run(impl, return_lse=True, **options))
        expected.check(self.run(impl, **options))


def mixed(start: int, kv_heads: int, among: Sequence[Reach] = REACHES) -> list[Reach]:
    """A different reach for every KV head, and one twice."""
    found = [among[(start + head) % len(among)] for head in range(kv_heads)]
    return [*found[:-1], found[0]] if kv_heads > 2 else found


@pytest.mark.parametrize(
    ("heads", "dim", "dtype", "page_size", "num_tokens", "kind", "start"),
    columns(
        16,
        5,
        HEADS,
        DIMS,
        DTYPES,
        PAGE_SIZES,
        LENGTHS,
        [*KINDS, "single", "random"],
        range(len(REACHES)),
    ),
)
@pytest.mark.parametrize("impl", FAST)
def test_every_backend_agrees_with_float64(
    impl: str,
    heads: tuple[int, int],
    dim: int,
    dtype: torch.dtype,
    page_size: int,
    num_tokens: int,
    kind: str,
    start: int,
) -> None:
    requests = [
        Request(choose("random", 5, start), 7, mixed(start + 3, heads[1])),
        Request(choose(kind, num_tokens, start), num_tokens, mixed(start, heads[1])),
    ]
    Case.of(requests, heads, dim, impl=impl, dtype=dtype, page_size=page_size, seed=start).check(
        impl
    )


@pytest.mark.parametrize("start", range(0, len(REACHES), 4))
@pytest.mark.parametrize(
    ("impl", "dtype"), [("flex", d) for d in DTYPES] + [("reference", DTYPES[0])]
)
def test_slow_backends_agree_with_float64(impl: str, dtype: torch.dtype, start: int) -> None:
    requests = [
        Request([0, 3, 4], 5, mixed(start, 3)),
        Request(choose(KINDS[start // 4 % 4], 129, 3), 130, mixed(start + 2, 3)),
    ]
    Case.of(requests, (9, 3), 64, impl=impl, dtype=dtype, seed=start).check(impl)


@pytest.mark.parametrize("impl", ["reference", "torch", "triton", "flex"])
@pytest.mark.parametrize("reach", BLIND)
@pytest.mark.parametrize("positions", [[0, 1, 2, 3, 4, 5], [0, 9, 30, 31, 32, 33, 45], [18]])
def test_rows_without_a_visible_key_give_zero(
    positions: list[int], reach: Reach, impl: str
) -> None:
    requests = [Request(positions, 50, [reach, Reach(5)]), Request([3], 4, [Reach(), reach])]
    case = Case.of(requests, (4, 2), impl=impl, hold="all" if impl == "torch" else "seen")
    case.check(impl)


@pytest.mark.parametrize("impl", ["reference", *FAST])
@pytest.mark.parametrize(("window", "sink"), [(8, 4), (8, 64), (39, 4), (40, 40), (64, 0)])
def test_a_sink_inside_the_window_counts_once(window: int, sink: int, impl: str) -> None:
    case = Case.of([Request(range(40), 40, [Reach(window, sink)] * 2)], (8, 2), impl=impl)
    own, key = torch.arange(40)[:, None], torch.arange(40)[None, :]
    mask = (key <= own) & ((key < sink) | (key + window > own))
    states = [x[0].repeat_interleave(4, 0) for x in (case.pages.keys, case.pages.values)]
    right = F.scaled_dot_product_attention(case.query.cpu().double(), *states, attn_mask=mask)
    expected = case.truth
    assert (expected.out - right.transpose(0, 1).flatten(1)).abs().max() < 1e-12
    expected.check(case.run(impl))


@pytest.mark.parametrize("impl", ["reference", *FAST])
@pytest.mark.parametrize("num_tokens", [1, 7, 130])
@pytest.mark.parametrize("reach", [Reach(), Reach(130, 4), Reach(horizon=130)])
def test_rows_that_see_everything_equal_causal_attention(
    reach: Reach, num_tokens: int, impl: str
) -> None:
    case = Case.of([Request(range(num_tokens), num_tokens, [reach] * 2)], (8, 2), impl=impl)
    states = [x[0].repeat_interleave(4, 0) for x in (case.pages.keys, case.pages.values)]
    right = F.scaled_dot_product_attention(case.query.cpu().double(), *states, is_causal=True)
    expected = case.truth
    assert (expected.out - right.transpose(0, 1).flatten(1)).abs().max() < 1e-12
    expected.check(case.run(impl))


@pytest.mark.parametrize("impl", ["reference", *FAST, "flex"])
def test_parts_of_zero_length(impl: str) -> None:
    """KN-04: query lengths 0, 1, 0, 1 over 0, 3, 0 and 5 keys."""
    requests = [
        Request(positions, num_tokens, [Reach(), Reach(2, 1), Reach(1)])
        for positions, num_tokens in (([], 0), ([2], 3), ([], 0), ([4], 5))
    ]
    Case.of(requests, (9, 3), impl=impl).check(impl)


@pytest.mark.parametrize("impl", ["auto", "reference", *FAST, "flash", "flex"])
@pytest.mark.parametrize("parts", [0, 2])
def test_a_call_without_rows_gives_empty_results(parts: int, impl: str) -> None:
    case = Case.of([Request([], 0, [Reach()] * 3), Request([0], 1, [Reach()] * 3)], (9, 3), 64)
    plan = AttendPlan.of(*(Part(0, place([]), (Reach(),) * 3) for _ in range(parts)))
    out, lse = attend(case.query[:, :0], case.pages.kv, plan, scale=1.0, impl=impl, return_lse=True)
    assert out.shape == (0, 9 * 64)
    assert lse.shape == (9, 0)
    assert lse.dtype is torch.float32


@pytest.mark.parametrize("impl", ["reference", *FAST, "flex"])
def test_rows_of_one_request_may_see_by_two_maps_in_any_order(impl: str) -> None:
    """The question's rows come after those of the context, here also those of another request."""
    local, wide = (Reach(8, 4), Reach(3)), (Reach(), Reach(16, 2))
    parts = [(0, range(60, 70), wide), (1, [0, 4, 11], local), (0, range(20, 60), local)]
    requests = [Request(range(70), 70, wide), Request(range(12), 12, wide)]
    case = Case.of(requests, (4, 2), impl=impl)
    rows = [[*part, *range(70 * index, 70 * index)] for index, part, _ in parts]
    order = [p + 70 * index for (index, _, _), part in zip(parts, rows, strict=True) for p in part]
    plan = AttendPlan.of(*(Part(i, place(list(p)), reaches) for i, p, reaches in parts))
    query = case.query[:, order]
    with poisoned():
        out, lse = attend(query, case.pages.kv, plan, scale=case.scale, impl=impl, return_lse=True)
    first = 0
    for index, positions, reaches in parts:
        mine = slice(first, first + len(positions))
        one = Pages(case.pages.kv, [case.pages.keys[index]], [case.pages.values[index]])
        asked = [Request(list(positions), 70, reaches)]
        truth(query[:, mine], one, asked, case.scale).check(out[mine], lse[:, mine])
        first = mine.stop


@pytest.mark.parametrize("row_block", [1, 7, 1000])
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_rows_change_nothing_but_rounding(kind: str, row_block: int) -> None:
    request = Request(choose(kind, 137, 2), 137, [Reach(), Reach(8, 4), Reach(40)])
    Case.of([request], (9, 3), impl="torch").check("torch", row_block=row_block)


@pytest.mark.parametrize("impl", FAST)
@pytest.mark.parametrize("plane", [0, 1])
@pytest.mark.parametrize("token", [0, 3, 40, 77])
def test_a_token_changes_exactly_the_rows_and_heads_that_see_it(
    token: int, plane: int, impl: str
) -> None:
    positions = [0, 2, 3, 10, 40, 41, 47, 48, 55, 56, 60, 77, 79]
    reaches = [Reach(8, 4), Reach(1), Reach(), Reach(16, 2, 40), Reach(horizon=16)]
    case = Case.of([Request(positions, 80, reaches)], (10, 5), impl=impl, hold="all")
    before = case.run(impl)
    kv = case.pages.kv
    page = kv.table[:, token // 16].long()
    (kv.key, kv.value)[plane][page, token % 16] += 1
    after = case.run(impl)
    changed = (before != after).view(len(positions), 5, -1).any(-1).cpu()
    expected = [[token in shown(p, reach) for reach in reaches] for p in positions]
    if plane == 0:  # the only key that a row sees has weight 1 whatever it is
        alone = [[len(shown(p, reach)) == 1 for reach in reaches] for p in positions]
        changed |= torch.tensor(expected) & torch.tensor(alone)
    assert torch.equal(changed, torch.tensor(expected))


@settings(max_examples=40, deadline=None, phases=QUICK)
@given(data=st.data())
def test_any_call_of_the_torch_backend_agrees_with_float64(data: st.DataObject) -> None:
    _any_call(data, "torch", 300)


@settings(max_examples=6, deadline=None, phases=QUICK)
@given(data=st.data())
def test_any_call_of_the_triton_backend_agrees_with_float64(data: st.DataObject) -> None:
    _any_call(data, "triton", 60)


def _any_call(data: st.DataObject, impl: str, longest: int) -> None:
    heads = data.draw(st.sampled_from([(2, 1), (9, 3), (14, 2)]), "heads")
    limit = st.integers(1, longest)
    reach = st.one_of(
        st.just(Reach()),
        st.tuples(limit, st.integers(0, longest), st.one_of(st.none(), limit)).map(
            lambda numbers: Reach(*numbers)
        ),
        limit.map(lambda horizon: Reach(horizon=horizon)),
    )
    requests = []
    for seed in data.draw(st.lists(st.integers(0, 2**16), min_size=1, max_size=2), "seeds"):
        num_tokens = data.draw(limit, "tokens")
        kind = data.draw(st.sampled_from(KINDS), "rows")
        reaches = data.draw(st.lists(reach, min_size=heads[1], max_size=heads[1]), "reaches")
        requests.append(Request(choose(kind, num_tokens, seed), num_tokens, reaches))
    page_size = data.draw(st.sampled_from([1, 4, 16, 32, 48]), "page size")
    Case.of(requests, heads, impl=impl, page_size=page_size).check(impl)


@pytest.mark.parametrize("impl", ["reference", *FAST])
def test_the_order_of_pages_changes_nothing(impl: str) -> None:
    request = Request(choose("random", 90, 1), 90, [Reach(), Reach(16, 4), Reach(horizon=30)])
    case = Case.of([request], (9, 3), impl=impl, page_size=8)
    kv = case.pages.kv
    order = torch.randperm(len(kv.key) + 5, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    order = order[: len(kv.key)].sort().values if impl == "torch" else order[: len(kv.key)]
    planes = torch.full((2, len(kv.key) + 5, *kv.key.shape[1:]), NAN, device=DEVICE)
    planes[:, order] = torch.stack([kv.key, kv.value])
    table = torch.where(kv.table >= 0, order[kv.table.clamp(min=0).long()], -1).int()
    moved = Pages(PagedKV(planes[0], planes[1], table, 3), case.pages.keys, case.pages.values)
    assert torch.equal(case.run(impl), Case(case.query, moved, case.requests).run(impl))


@pytest.mark.parametrize("impl", ["reference", *FAST])
def test_another_request_changes_nothing_but_rounding(impl: str) -> None:
    request = Request(range(20, 40), 40, [Reach(), Reach(16, 4)])
    other = Request(range(7), 7, [Reach(2), Reach()])
    case = Case.of([request, other], (4, 2), impl=impl)
    alone = plan_of([request])
    out = attend(case.query[:, :20], case.pages.kv, alone, scale=case.scale, impl=impl)
    expected = case.truth
    assert bool(((out.cpu() - expected.out[:20]).abs() <= expected.out_bound[:20]).all())


def test_a_plan_serves_layers_of_other_groups_and_tile_heights() -> None:
    request = Request(choose("random", 70, 4), 70, [Reach(), Reach(9, 2)])
    plan = plan_of([request])
    for heads, dim in (((4, 2), 32), ((14, 2), 64), ((2, 2), 32)):
        case = Case.of([request], heads, dim)
        with poisoned():
            out = attend(case.query, case.pages.kv, plan, scale=case.scale, impl="triton")
        case.truth.check(out)


@pytest.mark.parametrize("impl", ["auto", "reference", *FAST, "flex"])
def test_contiguous_keys_are_pages_of_their_own(impl: str) -> None:
    case = Case.of([Request([3, 17, 30], 31, [Reach(), Reach(8, 2)])], (4, 2), impl=impl)
    key, value = (x[0].float().to(DEVICE) for x in (case.pages.keys, case.pages.values))
    kv = PagedKV.dense(key, value)
    assert kv.key.data_ptr() == key.data_ptr()
    out = attend(case.query, kv, plan_of(case.requests), scale=case.scale, impl=impl)
    case.truth.check(out)


def test_torch_takes_pages_that_descend_from_head_to_head() -> None:
    kv = PagedKV(
        torch.randn(4, 16, 32, device=DEVICE),
        torch.randn(4, 16, 32, device=DEVICE),
        torch.tensor([[3], [1]], dtype=torch.int32, device=DEVICE),
        2,
    )
    plan = AttendPlan.of(Part(0, place([2, 5]), (Reach(), Reach())))
    query = torch.randn(4, 2, 32, device=DEVICE)
    right = attend(query, kv, plan, scale=0.2, impl="reference")
    assert (attend(query, kv, plan, scale=0.2, impl="torch") - right).abs().max() < 1e-5


@pytest.mark.parametrize(
    "impl",
    [
        "reference",
        "triton",
        "flex",
        "torch",
    ],
)
@pytest.mark.parametrize(
    ("positions", "reaches"),
    [
        ([1, 2, 70, 100], [Reach(4), Reach(4)]),
        ([1, 2, 70, 100], [Reach(8, 4), Reach(horizon=6)]),
        ([10], [Reach(0, 2), Reach(0, 2)]),
        ([15], [Reach(0, 2), Reach(0, 2)]),
    ],
)
def test_pages_of_which_no_row_sees_a_key_may_be_absent(
    positions: list[int], reaches: list[Reach], impl: str
) -> None:
    pages = Pages.of([Request(positions, 110, reaches)], 2, 32, page_size=4, climbing=True)
    query = torch.randn(4, len(positions), 32, device=DEVICE)
    case = Case(query, pages, [Request(positions, 110, reaches)])
    case.check(impl)


@pytest.mark.parametrize("impl", ["torch"])
@pytest.mark.parametrize("gone", [0, 3, 6])
def test_a_page_that_a_row_sees_may_not_be_absent(gone: int, impl: str) -> None:
    case = Case.of([Request([40, 100], 101, [Reach()] * 2)], (4, 2), impl=impl)
    case.pages.kv.table[1, gone] = -1
    with pytest.raises(ValueError, match="not all held"):
        case.run(impl)


def test_the_log_sum_exp_of_the_reference_is_float32() -> None:
    case = Case.of([Request([3], 4, [Reach()])], (2, 1), dtype=torch.float16)
    _, lse = case.run("reference", return_lse=True)
    assert lse.dtype is torch.float32


def test_more_sinks_than_int32_holds_are_all_sinks() -> None:
    case = Case.of([Request([3, 20], 21, [Reach(4, 2**31)])], (2, 1))
    case.check("triton")
