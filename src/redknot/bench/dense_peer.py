"""The dense prefill to beat: the executor's own compiled parts around a library's attention."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from redknot.bench.dense_attention import Attend, PeerUnavailable
from redknot.execution import Executor
from redknot.execution.layer import finish
from redknot.execution.parts import EAGER
from redknot.kernels.relocate import rotate
from redknot.kernels.upload import upload


class DensePeer:
    """Runs a whole prompt and keeps its K/V contiguous, as an engine must keep them somewhere.

    While no page of the executor is held they stand in its planes, so that they take no memory of
    their own.
    """

    def __init__(self, executor: Executor, attend: Attend) -> None:
        self._executor, self._attend = executor, attend
        if any(shape.horizon is not None for shape in executor.shapes):
            raise PeerUnavailable("the model has a sliding window of its own")
        self._keep = keep if executor.parts is EAGER else torch.compile(keep, dynamic=True)

    @torch.inference_mode()
    def prefill(self, token_ids: Int[Tensor, "token"]) -> Float[Tensor, "vocab"]:
        """Logits behind the last token; the K/V last until the executor's next request."""
        adapter, parts = self._executor.adapter, self._executor.parts
        keys, values = self._buffers(len(token_ids))
        angles = adapter.rotary.table(torch.arange(len(token_ids), device=adapter.device))
        hidden = adapter.embed(upload(token_ids, adapter.device))
        for index, layer in enumerate(adapter.layers):
            last = index == len(adapter.layers) - 1
            if last:
                ends = tuple(table[-1:] for table in angles)
                query, key, value = parts.project_tail(layer, hidden, *ends)
                hidden = hidden[-1:]
            else:
                query, key, value = parts.project(layer, hidden, *angles)
            self._keep(key, value, *angles, keys[index], values[index])
            attended = self._attend(query, keys[index], values[index], layer.shape.scale)
            hidden = finish(layer, hidden, attended, parts=parts)
        return adapter.logits(hidden)[-1]

    def _buffers(self, tokens: int) -> list[Float[Tensor, "layer kv_head token dim"]]:
        """One for keys and one for values."""
        shape = self._executor.shapes[0]
        size = (len(self._executor.shapes), shape.num_groups, tokens, shape.head_dim)
        storage, needed = self._executor.storage, torch.Size(size).numel()
        planes = [storage.planes[name] for name in ("key", "value")]
        if storage.pool.num_used or any(plane.numel() < needed for plane in planes):
            return [plane.new_empty(size) for plane in planes]
        return [plane.view(-1)[:needed].view(size) for plane in planes]


def keep(
    key: Float[Tensor, "kv_head token dim"],
    value: Float[Tensor, "kv_head token dim"],
    cosine: Float[Tensor, "token half"],
    sine: Float[Tensor, "token half"],
    kept_key: Float[Tensor, "kv_head token dim"],
    kept_value: Float[Tensor, "kv_head token dim"],
) -> None:
    """Rotate keys and write both where they stay."""
    kept_key.copy_(rotate(key, cosine, sine))
    kept_value.copy_(value)
