"""A request makes one copy of its prompt's K/V, whatever the policy."""

import weakref
from typing import Any

import pytest
import torch
from tests.tiny import random_ids, tiny_session
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from redknot.heads import HeadMap
from redknot.recovery.policies import POLICIES, parse_policy
from redknot.segments import Prompt

LAYERS, GROUPS, TOKENS = 24, 8, 1000


class LiveBytes(TorchDispatchMode):
    """Bytes of storages that are made under this mode and still alive, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        self._follow((args, kwargs), made=False)
        result = function(*args, **kwargs)
        self._follow(result, made=True)
        return result

    def _follow(self, values: Any, *, made: bool) -> None:
        for leaf in tree_leaves(values):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf.untyped_storage(), made)

    def _count(self, storage: torch.UntypedStorage, made: bool) -> None:
        key, size = storage._cdata, storage.nbytes() if made else 0
        if key in self._known:
            return
        self._known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


@pytest.mark.parametrize("name", POLICIES)
def test_peak_memory_is_one_cache_and_the_work_of_a_layer(name: str) -> None:
    session = tiny_session(layers=LAYERS, heads=(8, GROUPS))
    spans = [(start, start + 150) for start in range(20, 920, 150)]
    prompt = Prompt.of_ids(random_ids(TOKENS).tolist(), spans)
    session.build_missing(prompt)
    scores = torch.rand(LAYERS, GROUPS, generator=torch.Generator().manual_seed(0))
    head_map = HeadMap.from_scores(scores, global_share=0.5, window=64)
    with LiveBytes() as bytes_:
        prefilled = session.prefill(prompt, parse_policy(name), head_map)
    held = prefilled.cache.num_bytes
    assert bytes_.peak >= held  # the tracker sees the cache
    # One layer's K/V is 1/24 of the cache; projections, FFN and masks of a layer take a few such.
    assert bytes_.peak < 1.6 * held
