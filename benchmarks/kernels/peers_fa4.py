"""FA4 (`flash-attn-4`) under the calling form of `peers`: dense, by window, and block-sparse."""

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from .peers import Call, PeerUnavailable, Prefill, Sees, runs

BLOCK = 128  # FA4's tile on Hopper at head dim 128, rows and keys


def fa4_dense(p: Prefill) -> Call:
    """FA4, every head over everything."""
    return fa4_calls(p.seen("dense"))


def fa4_calls(p: Prefill, *, pack_gqa: bool | None = None) -> Call:
    """FA4, one call for each run of KV heads of one window (two here), without sinks."""
    attend = interface()._flash_attn_fwd  # the public function has no ``out``
    q, k, v = p.q.transpose(0, 1)[None], p.k.transpose(0, 1)[None], p.v.transpose(0, 1)[None]
    out = torch.empty_like(q)
    parts = [(w, slice(a, b), slice(a * p.group, b * p.group)) for w, a, b in runs(p.windows)]

    def call() -> Tensor:
        for window, kv, qs in parts:
            attend(
                q[:, :, qs], k[:, :, kv], v[:, :, kv], out=out[:, :, qs], softmax_scale=p.scale,
                causal=True, window_size_left=None if window is None else window - 1,
                pack_gqa=pack_gqa,
            )  # fmt: skip
        return out[0].transpose(0, 1)

    return call


def fa4_block_sparse(p: Prefill, *, pack_gqa: bool | None = None) -> Call:
    """FA4, one launch over planned block lists, window and sinks in a mask."""
    out = torch.empty_like(p.q.transpose(0, 1))
    launch = _sparse(p, 0, len(p.windows), out, pack_gqa)

    def call() -> Tensor:
        launch()
        return out.transpose(0, 1)

    return call


def fa4_calls_sinks(p: Prefill, *, pack_gqa: bool | None = None) -> Call:
    """FA4 with sinks, one call for each run of windows: plain causal, or block-sparse if local."""
    attend = interface()._flash_attn_fwd
    out = torch.empty_like(p.q.transpose(0, 1))
    parts = []
    for window, first, last in runs(p.windows):
        if window is not None:
            parts.append(_sparse(p, first, last, out, pack_gqa))
            continue
        qs = slice(first * p.group, last * p.group)
        q, k, v = (x.transpose(0, 1)[None] for x in (p.q[qs], p.k[first:last], p.v[first:last]))
        kept = {"softmax_scale": p.scale, "causal": True, "out": out[None, :, qs]}
        parts.append(lambda q=q, k=k, v=v, kept=kept: attend(q, k, v, **kept))

    def call() -> Tensor:
        for part in parts:
            part()
        return out.transpose(0, 1)

    return call


def block_lists(
    num_rows: int, windows: list[int | None], sink: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Blocks that a mask cuts and blocks seen whole, by KV head and block of rows.

    Count [kv_head, 1, row block] and indices [kv_head, 1, row block, longest], each twice.
    """
    starts = torch.arange(0, num_rows, BLOCK, device=device)
    ends = starts + BLOCK - 1
    row_first, row_last = starts[:, None], ends.clamp(max=num_rows - 1)[:, None]
    reach = torch.tensor([w or num_rows for w in windows], device=device)[:, None, None]
    some = (starts <= row_last) & ((ends > row_first - reach) | (starts < sink))
    whole = (ends <= row_first) & ((starts > row_last - reach) | (ends < sink))
    return *_compact(some & ~whole), *_compact(whole)


def fa4_mask(windows: list[int | None], sink: int, device: torch.device) -> tuple:
    """The mask for blocks that are seen in part, and its tensors; the batch is the KV head.

    With one window of a block or more the mask needs no head: a global head's only cut block is
    the diagonal one, whose keys are all inside such a window.
    """
    import cutlass
    import cutlass.cute as cute
    from flash_attn.cute import utils

    local = {w for w in windows if w is not None}
    if len(local) == 1 and min(local) >= BLOCK:
        window = min(local)

        @cute.jit
        def uniform(batch, head, row, key, seqlen_info, aux):
            reach = utils.scalar_to_ssa(window, cutlass.Int32)
            first = utils.scalar_to_ssa(sink, cutlass.Int32)
            return (key <= row) & ((row - key < reach) | (key < first))

        return uniform, None

    @cute.jit
    def by_head(batch, head, row, key, seqlen_info, aux):
        reach = utils.scalar_to_ssa(aux[0][batch[0]], cutlass.Int32)
        first = utils.scalar_to_ssa(sink, cutlass.Int32)
        return (key <= row) & ((row - key < reach) | (key < first))

    reach = [2**30 if w is None else w for w in windows]
    return by_head, [torch.tensor(reach, dtype=torch.int32, device=device)]


def _sparse(
    p: Prefill, first: int, last: int, out: Tensor, pack_gqa: bool | None
) -> Callable[[], object]:
    """A block-sparse launch of some KV heads, each a sequence of its own so that lists are its."""
    attend = interface()._flash_attn_fwd
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    if p.q.shape[-1] != BLOCK:
        raise ValueError(f"lists are planned for head dim {BLOCK}, not {p.q.shape[-1]}")
    windows, device = p.windows[first:last], p.q.device
    q, o = (
        x.unflatten(1, (-1, p.group)).transpose(0, 1)[first:last]
        for x in (p.q.transpose(0, 1), out)
    )
    k, v = p.k[first:last, :, None], p.v[first:last, :, None]
    lists = block_lists(p.k.shape[1], windows, p.sink, device)
    mask, aux = fa4_mask(windows, p.sink, device)
    blocks = BlockSparseTensorsTorch(*lists, block_size=(BLOCK, BLOCK))
    return lambda: attend(
        q, k, v, out=o, softmax_scale=p.scale, pack_gqa=pack_gqa,
        mask_mod=mask, aux_tensors=aux, block_sparse_tensors=blocks,
    )  # fmt: skip


def _compact(wanted: Tensor) -> tuple[Tensor, Tensor]:
    count = wanted.sum(-1)
    longest = max(int(count.max()), 1)
    listed = wanted.byte().argsort(dim=-1, descending=True, stable=True)[..., :longest]
    return count.int()[:, None], listed.int().contiguous()[:, None]


def interface() -> ModuleType:
    """FA4's module; PeerUnavailable where it is not installed."""
    try:
        import flash_attn.cute.interface as found
    except ImportError as error:
        raise PeerUnavailable(f"flash-attn-4 does not import: {error}") from error
    return found


PREFILL: dict[str, tuple[Callable[[Prefill], Call], Sees]] = {
    "fa4_dense": (fa4_dense, "dense"),
    "fa4_calls": (fa4_calls, "window"),
    "fa4_block_sparse": (fa4_block_sparse, "sinks"),
    "fa4_calls_sinks": (fa4_calls_sinks, "sinks"),
}
