"""What weights are these? Digests of every parameter, so that state never crosses models."""

import hashlib
import json
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Int, Int64
from torch import Tensor
from transformers import PreTrainedModel

BLOCK_WORDS = 1 << 17
"64-bit words of one block."
BLOCKS_AT_ONCE = 128
"128 MiB of them at a time."


def fingerprint(model: PreTrainedModel, *, rounded: bool = False) -> str:
    """SHA-256 over names, types, shapes and block sums of all parameters, adapters included.

    With ``rounded`` all are taken as bfloat16, so that one checkpoint opened in two types is the
    same. Blocks are summed where the weights are, at about memory speed: a model on a GPU is never
    copied off it. Every half of a 64-bit word counts with two odd factors of its own, modulo 2**64
    (Dietzfelbinger 1996, multiply-shift hashing): a change of a single half always shows, any other
    passes with a chance of 2**-64 or less. That is no defence against weights made to collide.
    """
    named = sorted(model.state_dict().items())
    sums = [_block_sums(_words(tensor, rounded)) for _, tensor in named]
    found = torch.cat(sums).cpu().numpy().tobytes() if sums else b""
    parts = [
        [name, str(torch.bfloat16 if rounded else tensor.dtype), list(tensor.shape)]
        for name, tensor in named
    ]
    digest = hashlib.sha256(json.dumps([model.config.model_type, parts]).encode())
    digest.update(found)
    return digest.hexdigest()


def _words(tensor: Tensor, rounded: bool) -> Iterator[Int64[Tensor, "block word"]]:
    """The bytes of ``tensor`` as blocks of words, the last one filled up with zeros."""
    flat = tensor.detach().contiguous().view(-1)
    slab = BLOCKS_AT_ONCE * BLOCK_WORDS * 8 // (2 if rounded else flat.element_size())
    for part in flat.split(slab):
        raw = (part.to(torch.bfloat16) if rounded else part).view(torch.uint8)
        missing = -len(raw) % (8 * BLOCK_WORDS)
        yield F.pad(raw, (0, missing)).view(torch.int64).view(-1, BLOCK_WORDS)


def _block_sums(slabs: Iterator[Int64[Tensor, "block word"]]) -> Int64[Tensor, "sum"]:
    """Sums of the words of each block, block by block, under both sets of factors."""
    found = []
    for blocks in slabs:
        low, high = blocks & 0xFFFFFFFF, blocks >> 32
        for first, second in _factors(blocks.device):
            found.append((low * first + high * second).sum(1))
    sets = [torch.cat(found[start::2]) for start in (0, 1) if found]
    return torch.stack(sets, 1).flatten() if sets else torch.zeros(0, dtype=torch.int64)


@lru_cache
def _factors(device: torch.device) -> Int[Tensor, "set half word"]:
    """Two sets of odd numbers for both halves of words; they depend on nothing."""
    numbers = np.random.Generator(np.random.Philox(20260101)).integers(
        -(2**63), 2**63, size=(2, 2, BLOCK_WORDS), dtype=np.int64
    )
    return torch.from_numpy(numbers | 1).to(device)
