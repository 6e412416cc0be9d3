"""Append in PyTorch: rotate, then copy rows to where their pages stand."""

import torch
from torch import Tensor

from redknot.kernels.paging import PagedKV
from redknot.kernels.relocate import rotate


def append(
    kv: PagedKV,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    cosine: Tensor,
    sine: Tensor,
    publish: Tensor | None,
    one_each: bool,
) -> None:
    """As `redknot.kernels.append.append`."""
    at = positions.to(torch.int64)
    if one_each:
        requests = torch.arange(kv.num_requests, device=at.device)
        table = kv.table.unflatten(0, (-1, kv.num_kv_heads))
        pages = table[requests, :, at // kv.page_size].T.to(torch.int64)
    else:
        pages = kv.table[:, at // kv.page_size].to(torch.int64)
    where = pages * kv.page_size + at % kv.page_size
    wanted = pages >= 0
    if publish is not None:
        wanted &= publish.to(wanted.device)
    everything = bool(wanted.all())
    rotated = rotate(key.to(cosine.dtype), cosine, sine)  # rounded once, to the plane's dtype
    for plane, fresh in ((kv.key, rotated), (kv.value, value)):
        flat = plane.view(-1, plane.shape[-1])
        if everything:
            flat.index_copy_(0, where.flatten(), fresh.to(plane.dtype).reshape(-1, flat.shape[1]))
        else:
            flat.index_copy_(0, where[wanted], fresh.to(plane.dtype)[wanted])
