"""What the benchmarks found, as it is written to JSON."""

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from redknot.bench.fidelity import Fidelity


class Spread(msgspec.Struct, frozen=True):
    """Repeated measurements."""

    median: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float], around: tuple[float, float] = (0, 100)) -> "Spread":
        """Median, and least and greatest or other percentiles."""
        low, median, high = np.percentile(values, [around[0], 50, around[1]])
        return cls(float(median), float(low), float(high), len(values))


class Work(msgspec.Struct, frozen=True):
    """What one prefill computed."""

    flops: int
    flops_share: float
    "Of the unmodified model's."
    floor_seconds: float
    "Were all FLOPs as fast as a large product of matrices."
    policy: str
    "What ran: the planner may have chosen dense."
    decision: str | None = None
    "Why, where a planner was asked."
    cached_tokens: int | None = None
    "Of the prompt, as `Plan.cached_tokens` counts them; null in reports of older releases."


class TtftRow(msgspec.Struct, frozen=True, kw_only=True):
    """One contender at one length."""

    name: str
    kind: Literal["dense", "peer", "setting"]
    share: float | None = None
    "Of global groups."
    skipped: str | None = None
    "Why nothing was measured."
    warm_up_seconds: float | None = None
    "The first run, compilation included."
    seconds: Spread | None = None
    extrapolated_seconds: float | None = None
    "Of the median to all layers, where only some were loaded."
    speed_up: float | None = None
    "Over the best dense at this length."
    achieved: float | None = None
    "The speed-up over what the saved FLOPs promise."
    work: Work | None = None
    stages: dict[str, float] = {}
    "Median seconds."
    token: int | None = None
    fidelity: dict[str, Fidelity | None] = {}
    "By evaluation report; null where it has not measured this setting."


class TtftLength(msgspec.Struct, frozen=True, kw_only=True):
    """All contenders on one prompt."""

    tokens: int
    segments: tuple[int, ...]
    "Tokens of each."
    build_seconds: float | None
    "For the state of all segments, before any run; null where none is stored."
    stored_bytes: int
    best_dense: str
    rows: list[TtftRow]


class Report(msgspec.Struct, frozen=True, kw_only=True, tag_field="benchmark"):
    """Any benchmark: of which model, where and how; the tag says which."""

    model: str
    environment: dict[str, str]
    settings: dict[str, str]
    notes: list[str] = []

    @property
    def benchmark(self) -> str:
        """As it is written."""
        return str(self.__struct_config__.tag)


class TtftReport(Report, frozen=True, kw_only=True, tag="time to first token"):
    """Time to first token."""

    matmul_flops_per_second: float
    calibration_seconds: float | None
    "Of the planner, once a process."
    lengths: list[TtftLength]


class Part(msgspec.Struct, frozen=True):
    """One part of one run."""

    name: str
    milliseconds: float
    share: float
    "Of the sum."
    floor_milliseconds: float | None
    "Its FLOPs as fast as a large product of matrices."


class BreakdownRow(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of one run went."""

    name: str
    parts: list[Part]
    sum_milliseconds: float
    wall_milliseconds: float
    "Of the same run."
    first_run_seconds: float
    work: Work
    fidelity: dict[str, Fidelity | None] = {}


class BreakdownReport(Report, frozen=True, kw_only=True, tag="parts of the time to first token"):
    """Parts of the time to first token."""

    tokens: int
    matmul_flops_per_second: float
    build_seconds: float
    rows: list[BreakdownRow]


class DecodeRow(msgspec.Struct, frozen=True, kw_only=True):
    """Steps of one setting in a batch of one size."""

    name: str
    share: float | None
    "Of global groups."
    batch: int
    skipped: str | None = None
    first_steps_seconds: float | None = None
    "Of those that compile and capture."
    step_seconds: Spread | None = None
    "Median, 20 and 80 per cent."
    tokens_per_second: float | None = None
    "Of all requests together."
    extrapolated_step_seconds: float | None = None
    speed_up: float | None = None
    "Of the median step, over dense in a batch of this size."
    kv_share: float | None = None
    "Share of the prompt's K/V that a request keeps."
    kv_bytes: int | None = None
    "Of one request's pages before the first step."
    fidelity: dict[str, Fidelity | None] = {}


class DecodeReport(Report, frozen=True, kw_only=True, tag="steps of decoding"):
    """Decoding over random K/V."""

    tokens: int
    rows: list[DecodeRow]


class CapacityRow(msgspec.Struct, frozen=True, kw_only=True):
    """How many requests one setting holds at once, and how fast they decode together."""

    name: str
    share: float | None
    "Of global groups; null for dense K/V."
    skipped: str | None = None
    residents: int = 0
    stopped_by: str = ""
    "Why there is not one more."
    pages_each: int | None = None
    "Of a resident after its prefill."
    pages_in_use: int | None = None
    "Of all residents before the first step."
    prefill_seconds: Spread | None = None
    first_steps_seconds: float | None = None
    step_seconds: Spread | None = None
    "Median, 20 and 80 per cent, of the steps after the first."
    tokens_per_second: float | None = None
    "Of all residents together."
    extrapolated_step_seconds: float | None = None
    peak_bytes: int | None = None
    "Of device memory, weights included; null on a CPU."
    pages_left: int | None = None
    "Still held after all requests are dropped: 0."
    residents_ratio: float | None = None
    "To dense K/V."
    tokens_per_second_ratio: float | None = None
    fidelity: dict[str, Fidelity | None] = {}


class TrafficRow(msgspec.Struct, frozen=True, kw_only=True):
    """One setting under the load of some number of clients."""

    name: str
    share: float | None
    "Of global groups."
    clients: int
    skipped: str | None = None
    requests: int = 0
    seconds: float | None = None
    "From the first request to the last token."
    requests_per_second: float | None = None
    tokens_per_second: float | None = None
    "New tokens of all requests."
    ttft_seconds: Spread | None = None
    "Median, 5 and 95 per cent; waiting included."
    token_seconds: Spread | None = None
    "Between two tokens of a request: median, 5 and 95 per cent."
    cached_share: float | None = None
    "Of prompt tokens, by the share of layers that were not computed."
    preemptions: int | None = None
    ttft_ratio: float | None = None
    "Dense's median over this one's, at as many clients."
    tokens_per_second_ratio: float | None = None
    "To dense's."
    fidelity: dict[str, Fidelity | None] = {}


class TrafficReport(Report, frozen=True, kw_only=True, tag="traffic"):
    """Many clients of one engine."""

    tokens: int
    new_tokens: int
    num_pages: int
    page_bytes: int
    build_seconds: float
    "For the state of all documents."
    rows: list[TrafficRow]


class CapacityReport(Report, frozen=True, kw_only=True, tag="capacity"):
    """Residents of one pool."""

    tokens: int
    new_tokens: int
    num_pages: int
    page_bytes: int
    build_seconds: float | None
    rows: list[CapacityRow]
