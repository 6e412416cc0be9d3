"""Score and select: the column mass of a probe at the prompt's end and the tokens it takes."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from redknot.kernels.attend import AttendPlan, Part, Reach, Rows, attend
from redknot.kernels.paging import PagedKV
from redknot.kernels.score import column_mass
from redknot.kernels.score.reference import column_mass as true_mass
from redknot.kernels.select import select_top

from .bench import Bench, Case
from .check import Errors, errors, same
from .peers import Call
from .record import Record, max_sm_clock_hz
from .setting import Setting

LAUNCHES = 12
SHARE_TAKEN = 0.4
NOT_CANDIDATES = 39  # first tokens that are never scored, as a fixed prefix is not
EXP2_PER_CLOCK = 16  # of one multiprocessor of a Hopper
ROTATED_BYTES = 2**28


@dataclass(frozen=True, eq=False)
class Inputs:
    """One copy: keys and values of one request, and the probe with its log-sum-exp."""

    setting: Setting
    kv: PagedKV
    query: Tensor
    rows: Rows
    tokens: int

    @classmethod
    def of(cls, setting: Setting, tokens: int) -> "Inputs":
        """Random ones."""
        k, v = (setting.random(setting.num_kv_heads, tokens, setting.dim) for _ in range(2))
        kv = setting.in_pages(k, v, setting.small_page)
        query = setting.random(setting.probe_rows, setting.num_query_heads, setting.dim)
        rows = Rows.at(torch.arange(tokens - setting.probe_rows, tokens), setting.device)
        return cls(setting, kv, query.transpose(0, 1), rows, tokens)

    @cached_property
    def plan(self) -> AttendPlan:
        """The probe sees everything."""
        return AttendPlan.of(Part(0, self.rows, (Reach(),) * self.setting.num_kv_heads))

    @cached_property
    def truth(self) -> tuple[Tensor, Tensor]:
        """Output [row, query_head * dim] and log-sum-exp in float64."""
        return attend(
            self.query.double(), self._double, self.plan,
            scale=self.setting.scale, return_lse=True, impl="reference",
        )  # fmt: skip

    @property
    def _double(self) -> PagedKV:
        key, value = self.kv.key.double(), self.kv.value.double()
        return PagedKV(key, value, self.kv.table, self.kv.num_kv_heads)

    @cached_property
    def lse(self) -> Tensor:
        """As the probe's own attention hands it on."""
        return self.truth[1].float().contiguous()

    @cached_property
    def among(self) -> Tensor:
        """Candidates."""
        among = torch.ones(self.tokens, dtype=torch.bool, device=self.query.device)
        among[:NOT_CANDIDATES] = False
        return among

    @cached_property
    def scores(self) -> Tensor:
        """Column mass of all heads."""
        return self.mass().sum(0)

    @property
    def count(self) -> int:
        """Tokens that are taken."""
        return int(self.tokens * SHARE_TAKEN)

    def mass(self) -> Tensor:
        """Column mass by our kernel."""
        return column_mass(
            self.query, self.kv, self.rows, self.lse, scale=self.setting.scale, impl="triton"
        )

    def select(self) -> Tensor:
        """Our selection from known scores."""
        return select_top(self.scores, self.count, self.among, impl="triton")

    def both(self) -> Tensor:
        """What a stage does."""
        return select_top(self.mass().sum(0), self.count, self.among, impl="triton")

    def topk(self) -> Tensor:
        """torch's way, over scores that were masked before."""
        return torch.topk(self._masked, self.count, sorted=False).indices.sort().values

    def probe(self) -> Tensor:
        """Attention of the probe with its log-sum-exp: the pass before the score."""
        return attend(
            self.query, self.kv, self.plan,
            scale=self.setting.scale, return_lse=True, impl="triton",
        )[0]  # fmt: skip

    def copy_keys(self) -> Tensor:
        """Read and write all keys once."""
        return self._target.copy_(self.kv.key)

    @cached_property
    def _masked(self) -> Tensor:
        return self.scores.masked_fill(~self.among, -torch.inf)

    @cached_property
    def _target(self) -> Tensor:
        return torch.empty_like(self.kv.key)

    def check_mass(self, found: Tensor) -> Errors:
        """Against the reference in float64, head by head."""
        truth = true_mass(
            self.query.double(), self._double, self.rows, self.truth[1],
            scale=self.setting.scale, horizon=None, request=0,
        )  # fmt: skip
        return errors(found, truth)

    def check_selected(self, found: Tensor) -> Errors:
        """The same tokens as torch's stable sort takes."""
        return same(found, select_top(self.scores, self.count, self.among, impl="torch"))

    def check_topk(self, found: Tensor) -> Errors:
        """The same scores: of equal ones it may take any."""
        truth = select_top(self.scores, self.count, self.among, impl="torch")
        return same(self.scores[found].sort().values, self.scores[truth].sort().values)

    def check_probe(self, found: Tensor) -> Errors:
        """Against the reference in float64."""
        heads = self.setting.num_query_heads
        return errors(found.unflatten(1, (heads, -1)), self.truth[0].unflatten(1, (heads, -1)))

    def check_copy(self, found: Tensor) -> Errors:
        """Equal."""
        return same(found, self.kv.key)


def run(bench: Bench) -> None:
    """Every length of the setting, with the floors of one layer's work."""
    setting = bench.setting
    for tokens in setting.probes:
        key_bytes = setting.num_kv_heads * tokens * setting.dim * setting.dtype.itemsize
        num_copies = 1 if setting.tiny else max(2, -(-ROTATED_BYTES // key_bytes))
        copies = [Inputs.of(setting, tokens) for _ in range(num_copies)]
        for inputs in copies:
            _ = inputs.scores, inputs._masked, inputs._target  # made before anything is timed
        pairs = setting.num_query_heads * setting.probe_rows * tokens
        product = 2 * pairs * setting.dim
        cases = [
            _case("score", copies, Inputs.mass, Inputs.check_mass, key_bytes, product),
            _case("select", copies, Inputs.select, Inputs.check_selected),
            _case("score + select", copies, Inputs.both, Inputs.check_selected, key_bytes, product),
            _case("topk + sort", copies, Inputs.topk, Inputs.check_topk),
            _case("copy of the keys", copies, Inputs.copy_keys, Inputs.check_copy, 2 * key_bytes),
            _case("probe attention", copies, Inputs.probe, Inputs.check_probe, 2 * key_bytes,
                  2 * product),
        ]  # fmt: skip
        shape = f"tokens={tokens} rows={setting.probe_rows} page={setting.small_page}"
        bench.group("score_select", shape, cases, launches=LAUNCHES, against=["copy of the keys"])
        for record in _floors(bench, shape, key_bytes, product, pairs):
            bench.add(record)


def _floors(bench: Bench, shape: str, key_bytes: int, flops: int, exps: int) -> list[Record]:
    """Times that no kernel can go below."""
    found = []
    common = {"op": "score_select", "shape": shape, "kind": "floor"}
    copy, matmul, clock = bench.ceiling("copy"), bench.ceiling("matmul"), max_sm_clock_hz()
    if copy is not None:
        median = key_bytes / copy.tb_per_s / 1e6
        notes = f"{key_bytes} bytes at the measured {copy.tb_per_s:.2f} TB/s"
        found.append(Record(impl="reading the keys", median_us=median, notes=notes, **common))
    if matmul is not None:
        median = flops / matmul.tflop_per_s / 1e6
        notes = f"{flops} FLOPs at the measured {matmul.tflop_per_s:.0f} TFLOP/s"
        found.append(Record(impl="products", median_us=median, notes=notes, **common))
    if clock is not None and bench.setting.device.type == "cuda":
        units = torch.cuda.get_device_properties(bench.setting.device).multi_processor_count
        median = exps / (EXP2_PER_CLOCK * units * clock) * 1e6
        notes = f"{exps} exp2, {EXP2_PER_CLOCK} a clock and SM, {units} SMs, {clock / 1e9} GHz"
        found.append(Record(impl="exp2", median_us=median, notes=notes, **common))
    return found


def _case(
    name: str, copies: list[Inputs], call: Callable[[Inputs], Tensor],
    check: Callable[[Inputs, Tensor], Errors], num_bytes: int = 0, flops: int = 0,
) -> Case:  # fmt: skip
    return Case(
        impl=name,
        make=partial(_calls, copies, call),
        check=lambda copy, out: check(copies[copy], out),
        kind="peer" if name in ("topk + sort", "copy of the keys") else "ours",
        num_bytes=num_bytes,
        flops=flops,
    )


def _calls(copies: list[Inputs], call: Callable[[Inputs], Tensor]) -> list[Call]:
    return [partial(call, inputs) for inputs in copies]
