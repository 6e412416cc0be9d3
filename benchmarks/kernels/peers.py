"""Rival kernels under one calling form: what the benchmark measures this library against.

A peer is a function of a `Prefill` or a `Decode` that returns a zero-argument call; the call
launches the work and returns its output, [query_head, row, dim] for a prefill and
[request, query_head, dim] for a decode. Layout changes that an engine would do once are made
before the call. `PREFILL` says what each peer lets a row see, so that it can be checked against
`reference` of that. The FA4 peers are in `peers_fa4`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Call = Callable[[], Tensor]
Sees = Literal["dense", "window", "sinks"]


class PeerUnavailable(RuntimeError):
    """A peer's library is not installed here; the caller skips its row."""


@dataclass(frozen=True, slots=True, eq=False)
class Prefill:
    """One layer, all rows, causal."""

    q: Tensor  # [query_head, row, dim], stored as [row, query_head, dim]
    k: Tensor  # [kv_head, row, dim], contiguous
    v: Tensor
    windows: list[int | None]  # by KV head; None sees everything
    sink: int
    scale: float

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.q.shape[0] // self.k.shape[0]

    def seen(self, sees: Sees) -> "Prefill":
        """The same inputs with what a peer of that kind lets a row see."""
        if sees == "dense":
            return replace(self, windows=[None] * len(self.windows), sink=0)
        return replace(self, sink=0) if sees == "window" else self


@dataclass(frozen=True, slots=True, eq=False)
class Decode:
    """One layer, one query row for each request, all requests of one length."""

    q: Tensor  # [request, query_head, dim]
    k: Tensor  # [request, token, kv_head, dim], contiguous
    v: Tensor
    windows: list[int | None]
    scale: float


def runs(windows: list[int | None]) -> Iterator[tuple[int | None, int, int]]:
    """Neighbouring KV heads of one window: (window, first, past the last)."""
    start = 0
    for stop in range(1, len(windows) + 1):
        if stop == len(windows) or windows[stop] != windows[start]:
            yield windows[start], start, stop
            start = stop


def reference(p: Prefill, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Output [query_head, picked row, dim] and LSE [query_head, picked row] in float64."""
    keys = torch.arange(p.k.shape[1], device=p.k.device)
    outs, sums = [], []
    for kv_head, window in enumerate(p.windows):
        behind = rows[:, None] - keys
        seen = behind >= 0
        if window is not None:
            seen &= (behind < window) | (keys < p.sink)
        picked = p.q[kv_head * p.group : (kv_head + 1) * p.group, rows].double()
        scores = (picked @ p.k[kv_head].double().T * p.scale).masked_fill(~seen, -torch.inf)
        sums.append(scores.logsumexp(-1))
        outs.append(scores.softmax(-1) @ p.v[kv_head].double())
    return torch.cat(outs), torch.cat(sums)


def graphed(call: Call, warmup: int = 3) -> Call:
    """``call`` as the replay of a CUDA graph: without the cost of Python and of the launch."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warmup):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()

    def replay() -> Tensor:
        graph.replay()
        return out

    return replay


def copy_ceiling(device: torch.device, size_bytes: int = 2**31) -> tuple[Call, int]:
    """A device copy and the bytes that it reads and writes."""
    source = torch.empty(size_bytes // 2, dtype=torch.bfloat16, device=device).normal_()
    target = torch.empty_like(source)
    return lambda: target.copy_(source), 2 * size_bytes


def matmul_ceiling(device: torch.device, size: int = 8192) -> tuple[Call, int]:
    """A bf16 product of random square matrices and its FLOPs."""
    a = torch.randn(size, size, dtype=torch.bfloat16, device=device)
    b = torch.randn_like(a)
    return lambda: a @ b, 2 * size**3


def cudnn_dense(p: Prefill) -> Call:
    """torch's cuDNN backend, causal."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def call() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(
                p.q[None], p.k[None], p.v[None], is_causal=True, scale=p.scale, enable_gqa=True
            )[0]

    return call


def sdpa_masked(p: Prefill, max_rows: int = 32768) -> Call:
    """torch's SDPA with an explicit boolean mask, one KV head's group after the other."""
    num_rows, group = p.k.shape[1], p.group
    if num_rows > max_rows:
        raise ValueError(f"a mask of {num_rows}² is not measured; at most {max_rows} rows")
    at = torch.arange(num_rows, device=p.k.device)
    behind = at[:, None] - at
    masks = {None: behind >= 0}
    for window in {w for w in p.windows if w is not None}:
        masks[window] = (behind >= 0) & ((behind < window) | (at < p.sink))
    del behind

    def call() -> Tensor:
        outs = []
        for kv_head, window in enumerate(p.windows):
            q = p.q[kv_head * group : (kv_head + 1) * group]
            k, v = (x[kv_head].expand(group, -1, -1) for x in (p.k, p.v))  # no math fallback
            outs.append(
                F.scaled_dot_product_attention(
                    q[None], k[None], v[None], attn_mask=masks[window], scale=p.scale
                )[0]
            )
        return torch.cat(outs)

    return call


def flex(p: Prefill, *, compiled: bool = True) -> Call:
    """FlexAttention over a block mask, sinks included."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    num_rows, group, sink = p.k.shape[1], p.group, p.sink
    reach = torch.tensor([w or num_rows for w in p.windows], device=p.q.device)

    def seen(b: Tensor, h: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return (row >= key) & ((row - key < reach[h // group]) | (key < sink))

    blocks = create_block_mask(
        seen, None, p.q.shape[0], num_rows, num_rows, device=p.q.device, _compile=compiled
    )
    attend = torch.compile(flex_attention, dynamic=False) if compiled else flex_attention
    return lambda: attend(
        p.q[None], p.k[None], p.v[None], block_mask=blocks, scale=p.scale, enable_gqa=True
    )[0]


def load_fa3(library: Path) -> None:
    """Register FA3's operators from the shared library of a vLLM wheel."""
    if not library.exists():
        raise PeerUnavailable(f"no FA3 library at {library}")
    torch.ops.load_library(str(library))


@dataclass(frozen=True, slots=True, eq=False)
class Sequences:
    """Where the sequences of an FA3 call lie: behind each other (by ``starts``) or in pages."""

    longest: int
    starts: Tensor | None = None  # of rows and keys alike, the end included; this build asks for it
    table: Tensor | None = None  # [sequence, page]
    used: Tensor | None = None  # [sequence]
    metadata: Tensor | None = None
    num_splits: int = 1


_FA3_UNUSED = (
    "k_new", "v_new", "q_v", "cu_seqlens_k_new", "seqused_q", "kv_batch_idx", "leftpad_k",
    "rotary_cos", "rotary_sin", "seqlens_rotary", "q_descale", "k_descale", "v_descale", "s_aux",
    "cp_tot_seqused_k",
)  # fmt: skip


def fa3(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, *,
    scale: float, where: Sequences, window: int | None = None, pack_gqa: bool | None = None,
) -> Tensor:  # fmt: skip
    """One FA3 launch, causal, any outer strides.

    q and out [row, head, dim] with ``starts``, [sequence, row, head, dim] with pages.
    """
    return fa3_ops().fwd(
        q, k, v, **dict.fromkeys(_FA3_UNUSED), out=out,
        cu_seqlens_q=where.starts, cu_seqlens_k=where.starts, seqused_k=where.used,
        max_seqlen_q=None if where.starts is None else where.longest, max_seqlen_k=where.longest,
        page_table=where.table, softmax_scale=scale, is_causal=True,
        window_size_left=-1 if window is None else window - 1, window_size_right=0,
        softcap=0.0, is_rotary_interleaved=True, scheduler_metadata=where.metadata,
        num_splits=where.num_splits, pack_gqa=pack_gqa, sm_margin=0, cp_world_size=1, cp_rank=0,
    )[0]  # fmt: skip


def fa3_dense(p: Prefill) -> Call:
    """FA3, every head over everything."""
    return fa3_calls(p.seen("dense"))


def fa3_calls(p: Prefill, *, pack_gqa: bool | None = None) -> Call:
    """FA3, one call for each run of KV heads of one window (two here); it knows no sinks."""
    fa3_ops()
    num_rows = p.k.shape[1]
    q, k, v = p.q.transpose(0, 1), *(x.transpose(0, 1).contiguous() for x in (p.k, p.v))
    out = torch.empty_like(q)
    where = Sequences(num_rows, torch.tensor([0, num_rows], dtype=torch.int32, device=q.device))
    parts = [(w, slice(a, b), slice(a * p.group, b * p.group)) for w, a, b in runs(p.windows)]

    def call() -> Tensor:
        for window, kv, qs in parts:
            fa3(
                q[:, qs], k[:, kv], v[:, kv], out[:, qs],
                scale=p.scale, where=where, window=window, pack_gqa=pack_gqa,
            )  # fmt: skip
        return out.transpose(0, 1)

    return call


def decode_fa3_dense(p: Decode, *, page_size: int = 128, num_splits: int = 0) -> Call:
    """FA3 over everything from pages that hold all KV heads, as engines run it."""
    return decode_fa3_calls(
        replace(p, windows=[None] * len(p.windows)), page_size=page_size, num_splits=num_splits
    )


def decode_fa3_calls(p: Decode, *, page_size: int = 128, num_splits: int = 0) -> Call:
    """FA3 from pages that hold all KV heads, one call for each run of windows; no sinks.

    ``num_splits`` 0 is FA3's heuristic. The schedule is made once, as engines make it once for
    all layers of a step.
    """
    k, v, table = _paged(p.k, p.v, page_size)
    group = p.q.shape[1] // p.k.shape[2]
    q = p.q[:, None]
    out = torch.empty_like(q)
    used = torch.full((len(q),), p.k.shape[1], dtype=torch.int32, device=q.device)
    parts = []
    for window, first, last in runs(p.windows):
        qs = slice(first * group, last * group)
        args = q[:, :, qs], k[:, :, first:last], v[:, :, first:last], out[:, :, qs]
        parts.append((args, window, _cache(*args[:2], table, used, window, num_splits)))

    def call() -> Tensor:
        for args, window, where in parts:
            fa3(*args, scale=p.scale, window=window, where=where)
        return out[:, 0]

    return call


def decode_fa3_per_head(p: Decode, *, page_size: int = 128, num_splits: int = 0) -> Call:
    """FA3, one call, each (request, KV head) a sequence with pages of its own; no sinks.

    A local head's page table starts at its window and its length is cut to it, so that no window
    is asked for and one launch serves both classes: FA3's best form. The windows must start at a
    page.
    """
    num_requests, num_tokens, num_kv, dim = p.k.shape
    if any(w is not None and (num_tokens - w) % page_size for w in p.windows):
        raise ValueError(f"the windows {p.windows} of {num_tokens} tokens must start at a page")
    own = [x.transpose(1, 2).reshape(-1, num_tokens, 1, dim) for x in (p.k, p.v)]
    k, v, whole = _paged(*own, page_size)
    table, lengths = torch.zeros_like(whole), []
    for kv_head, window in enumerate(p.windows):
        length = num_tokens if window is None else min(window, num_tokens)
        num_pages = length // page_size
        table[kv_head::num_kv, :num_pages] = whole[kv_head::num_kv, -num_pages:]
        lengths.append(length)
    used = torch.tensor(lengths * num_requests, dtype=torch.int32, device=k.device)
    q = p.q.reshape(num_requests * num_kv, 1, -1, dim)
    out = torch.empty_like(q)
    where = _cache(q, k, table, used, None, num_splits)

    def call() -> Tensor:
        fa3(q, k, v, out, scale=p.scale, where=where)
        return out.view_as(p.q)

    return call


def fa3_ops() -> "torch._ops._OpNamespace":
    """FA3's operators; PeerUnavailable where they are not loaded."""
    if not hasattr(torch.ops._vllm_fa3_C, "fwd"):
        raise PeerUnavailable("FA3 is not loaded; see load_fa3")
    return torch.ops._vllm_fa3_C


def _paged(k: Tensor, v: Tensor, page_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values in pages of random order, and the table [sequence, page]."""
    num_sequences, num_tokens, num_kv, dim = k.shape
    if num_tokens % page_size:
        raise ValueError(f"{num_tokens} tokens do not fill pages of {page_size}")
    order = torch.randperm(num_sequences * num_tokens // page_size, device=k.device)
    k, v = (x.reshape(-1, page_size, num_kv, dim)[order] for x in (k, v))
    return k, v, order.argsort().int().view(num_sequences, -1)


def _cache(
    q: Tensor, k: Tensor, table: Tensor, used: Tensor, window: int | None, num_splits: int
) -> Sequences:
    """The pages of a decode call with FA3's schedule made ahead."""
    _, page_size, num_kv, dim = k.shape
    longest = table.shape[1] * page_size
    metadata = fa3_ops().get_scheduler_metadata(
        len(q), 1, longest, q.shape[2], num_kv, dim, dim, q.dtype, used,
        None, None, None, None, None,  # cu_seqlens of q, k and new k; used q; left padding
        page_size, 0, True, -1 if window is None else window - 1, 0, False, num_splits, None, 0,
    )  # fmt: skip
    return Sequences(longest, None, table, used, metadata, num_splits)


PREFILL: dict[str, tuple[Callable[[Prefill], Call], Sees]] = {
    "fa3_dense": (fa3_dense, "dense"),
    "cudnn_dense": (cudnn_dense, "dense"),
    "fa3_calls": (fa3_calls, "window"),
    "flex": (flex, "sinks"),
    "sdpa_masked": (sdpa_masked, "sinks"),
}
