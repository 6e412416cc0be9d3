"""Attention of the dense peers: libraries under one calling form, causal over contiguous K/V."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from redknot.errors import InputError
from redknot.kernels.attend import flash

Attend = Callable[
    [
        Float[Tensor, "query_head row dim"],
        Float[Tensor, "kv_head token dim"],
        Float[Tensor, "kv_head token dim"],
        float,
    ],
    Float[Tensor, "row query_head*dim"],
]
"Takes queries of all tokens or of the last one alone, keys, values and the scale."


class PeerUnavailable(RuntimeError):
    """A peer cannot run here; the benchmark goes on without it."""


def sdpa(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """PyTorch's own choice."""
    whole = query.shape[1] == key.shape[1]  # a single last row sees everything
    out = F.scaled_dot_product_attention(
        query[None], key[None], value[None], is_causal=whole, scale=scale, enable_gqa=True
    )
    return out[0].transpose(0, 1).flatten(1)


def cudnn(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """cuDNN through PyTorch."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
        return sdpa(query, key, value, scale)


def fa4(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """FlashAttention-4."""
    from flash_attn.cute.interface import _flash_attn_fwd

    q, k, v = (states.transpose(0, 1)[None] for states in (query, key, value))
    out = q.new_empty(q.shape)
    _flash_attn_fwd(q, k, v, softmax_scale=scale, causal=True, out=out)
    return out[0].flatten(1)


_UNUSED = (
    "k_new", "v_new", "q_v", "cu_seqlens_k_new", "seqused_q", "seqused_k", "page_table",
    "kv_batch_idx", "leftpad_k", "rotary_cos", "rotary_sin", "seqlens_rotary", "q_descale",
    "k_descale", "v_descale", "scheduler_metadata", "pack_gqa", "s_aux", "cp_tot_seqused_k",
)  # fmt: skip


def fa3(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """FlashAttention-3 as vLLM builds it."""
    q, k, v = (states.transpose(0, 1) for states in (query, key, value))
    rows, tokens = (
        torch.arange(2, dtype=torch.int32, device=q.device) * len(states) for states in (q, k)
    )
    out = q.new_empty(q.shape)
    torch.ops._vllm_fa3_C.fwd(
        q, k, v, **dict.fromkeys(_UNUSED), out=out, cu_seqlens_q=rows, cu_seqlens_k=tokens,
        max_seqlen_q=len(q), max_seqlen_k=len(k), softmax_scale=scale, is_causal=True,
        window_size_left=-1, window_size_right=0, softcap=0.0, is_rotary_interleaved=True,
        num_splits=1, sm_margin=0, cp_world_size=1, cp_rank=0,
    )  # fmt: skip
    return out.flatten(1)


PEERS: dict[str, Attend] = {"fa3": fa3, "fa4": fa4, "cudnn": cudnn, "sdpa": sdpa}
HALF = (torch.float16, torch.bfloat16)


def parse_peers(text: str | None, device: torch.device) -> list[str]:
    """Names of peers; those of the device where the user names none."""
    if text is None:
        return ["fa3", "fa4", "cudnn"] if device.type == "cuda" else ["sdpa"]
    names = [] if text == "none" else [name.strip() for name in text.split(",")]
    for name in names:
        if name not in PEERS:
            raise InputError(f"unknown peer {name!r} (known: none, {', '.join(PEERS)})")
    return list(dict.fromkeys(names))


def peer(name: str, device: torch.device, dtype: torch.dtype, fa3_library: Path | None) -> Attend:
    """The attention called ``name``, its library loaded; `PeerUnavailable` where it cannot run."""
    if name != "sdpa" and (device.type != "cuda" or dtype not in HALF):
        raise PeerUnavailable(f"{name} runs float16 and bfloat16 on a GPU")
    if name == "fa4" and importlib.util.find_spec("flash_attn") is None:
        raise PeerUnavailable("flash-attn-4 is not installed")
    if name == "fa3" and not hasattr(torch.ops._vllm_fa3_C, "fwd"):
        library = fa3_library or flash._fa3_library()
        if library is None or not library.is_file():
            raise PeerUnavailable(f"no library of FlashAttention-3 at {library or 'vllm'}")
        torch.ops.load_library(str(library))
    return PEERS[name]
