"""The fingerprint tells any two sets of weights apart, and the same weights never."""

from collections.abc import Callable, Iterator
from itertools import product

import pytest
import torch
from tests.tiny import tiny_hf
from torch import Tensor, nn

from redknot.heads.shipped import shipped_map
from redknot.models import fingerprint as module
from redknot.models import load_model
from redknot.models.fingerprint import BLOCK_WORDS, BLOCKS_AT_ONCE, fingerprint


class Weights(nn.Module):
    """Something with weights, as far as a fingerprint looks."""

    def __init__(self, kind: str = "llama", **named: Tensor) -> None:
        super().__init__()
        self.config = type("Config", (), {"model_type": kind})()
        for name, tensor in named.items():
            self.register_buffer(name, tensor)


def of(tensor: Tensor, *, rounded: bool = False, name: str = "weight", kind: str = "llama") -> str:
    return fingerprint(Weights(kind, **{name: tensor}), rounded=rounded)  # type: ignore[arg-type]


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Blocks of 4 words, 2 at a time, so that a few words are many blocks."""
    monkeypatch.setattr(module, "BLOCK_WORDS", 4)
    monkeypatch.setattr(module, "BLOCKS_AT_ONCE", 2)
    module._factors.cache_clear()
    yield
    module._factors.cache_clear()


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("tokens", [1, 3, 40, 41])
def test_any_single_bit_counts(tokens: int, dtype: torch.dtype) -> None:
    tensor = noise(tokens, dtype=dtype)
    whole = of(tensor)
    for byte, bit in product(range(tokens * tensor.element_size()), range(8)):
        changed = tensor.clone()
        changed.view(torch.uint8)[byte] ^= 1 << bit
        assert of(changed) != whole
    assert of(tensor) == whole  # nothing was changed by looking


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_no_two_bits_make_up_for_each_other(dtype: torch.dtype) -> None:
    """The same bit of two words, for one: the sign of two weights."""
    tensor = noise(64 // torch.empty(0, dtype=dtype).element_size(), dtype=dtype)
    seen = set()
    for byte, bit in product(range(64), range(8)):
        changed = tensor.clone()
        changed.view(torch.uint8)[byte] ^= 1 << bit
        seen.add(of(changed))
    assert len(seen) == 512


@pytest.mark.parametrize("column", range(8))
def test_a_column_that_is_negated_counts(column: int) -> None:
    """In blocks as they are."""
    tensor = noise(64, 8, dtype=torch.bfloat16)
    changed = tensor.clone()
    changed[:, column].neg_()
    assert of(changed) != of(tensor)
    assert of(changed, rounded=True) != of(tensor, rounded=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_elements_at_the_borders_of_blocks_count(dtype: torch.dtype) -> None:
    """In blocks as they are; the last one is not full."""
    size = torch.empty(0, dtype=dtype).element_size()
    block = BLOCK_WORDS * 8 // size
    tensor = torch.zeros(2 * block + 5, dtype=dtype)
    places = [0, 1, block - 1, block, block + 1, 2 * block - 1, 2 * block, 2 * block + 4]
    seen = {of(tensor)}
    for place in places:
        changed = tensor.clone()
        changed[place] = 1
        seen.add(of(changed))
        changed[place] = -1
        seen.add(of(changed))
    assert len(seen) == 1 + 2 * len(places)


def test_what_lies_behind_the_first_slab_counts() -> None:
    """More than is summed at a time; bytes, so that it fits a small machine."""
    slab = BLOCKS_AT_ONCE * BLOCK_WORDS * 8
    tensor = torch.zeros(slab + 9, dtype=torch.uint8)
    seen = {of(tensor)}
    for place in (slab - 1, slab, slab + 8):
        tensor[place] = 1
        seen.add(of(tensor))
        tensor[place] = 0
    assert len(seen) == 4


@pytest.mark.usefixtures("small")
def test_an_order_counts() -> None:
    """Of elements, of words, of blocks, of slabs, of rows, and of tensors."""
    tensor = noise(64)
    seen = {of(tensor)}
    for size in (1, 2, 8, 16):
        pieces = list(tensor.split(size))
        for first, second in ((0, 1), (0, len(pieces) - 1)):
            swapped = list(pieces)
            swapped[first], swapped[second] = pieces[second], pieces[first]
            seen.add(of(torch.cat(swapped)))
    seen.add(of(tensor.flip(0)))
    assert len(seen) == 1 + 4 * 2 + 1
    square = noise(8, 8)
    assert of(square) != of(square.mT)
    one, other = noise(16), noise(17)[1:]
    assert fingerprint(Weights(a=one, b=other)) != fingerprint(Weights(a=other, b=one))


@pytest.mark.parametrize("rounded", [False, True])
def test_names_types_shapes_and_the_family_count(rounded: bool) -> None:
    tensor = torch.zeros(4, 6)
    seen = [
        of(tensor, rounded=rounded),
        of(tensor.view(6, 4), rounded=rounded),
        of(tensor.flatten(), rounded=rounded),
        of(torch.zeros(4, 7), rounded=rounded),  # as full of zeros as the rest of its block
        of(torch.zeros(0), rounded=rounded),
        of(tensor, rounded=rounded, name="bias"),
        of(tensor, rounded=rounded, kind="qwen3"),
        fingerprint(Weights(), rounded=rounded),
        fingerprint(Weights(weight=tensor, more=torch.zeros(0)), rounded=rounded),
    ]
    assert len(set(seen)) == len(seen)
    kinds = {of(tensor.to(dtype)) for dtype in (torch.float32, torch.float16, torch.bfloat16)}
    assert len(kinds) == 3
    assert len(set(seen) & {of(tensor, rounded=not rounded)}) == 0


@pytest.mark.usefixtures("small")
def test_the_rounded_form_is_that_of_the_checkpoint_in_any_type() -> None:
    half = noise(9, 5, dtype=torch.bfloat16)
    truth = of(half, rounded=True)
    assert of(half.float(), rounded=True) == of(half.double(), rounded=True) == truth
    nudged = half.float() * (1 + 2.0**-12)  # rounds back
    assert of(nudged, rounded=True) == truth
    assert of(nudged) != of(half.float())
    moved = half.clone()
    moved.view(torch.int16)[4, 2] += 1
    assert of(moved, rounded=True) != truth


def test_a_model_in_two_types_is_one_checkpoint() -> None:
    half = tiny_hf().to(torch.bfloat16)
    truth, own = fingerprint(half, rounded=True), fingerprint(half)
    full = half.float()
    assert fingerprint(full, rounded=True) == truth
    assert fingerprint(full) != own
    assert fingerprint(tiny_hf(), rounded=True) == fingerprint(tiny_hf(), rounded=True)
    assert fingerprint(tiny_hf(seed=1), rounded=True) != truth


def test_every_parameter_of_a_model_counts() -> None:
    hf = tiny_hf("qwen2", layers=2)
    seen = {fingerprint(hf)}
    parameters = dict(hf.named_parameters())
    with torch.no_grad():
        for parameter in parameters.values():
            last = parameter.view(-1)[-1:]
            kept = last.clone()
            last.add_(1)
            seen.add(fingerprint(hf))
            last.copy_(kept)
    assert len(seen) == 1 + len(parameters)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize(
    "lay",
    [
        lambda x: x.mT.contiguous().mT,
        lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
        lambda x: torch.cat([x[:1], x])[1:],
        lambda x: torch.stack([x, -x], -1)[..., 0],
        lambda x: nn.Parameter(x),
    ],
    ids=["transposed", "cut rows", "offset", "strided", "parameter"],
)
def test_how_weights_lie_in_memory_does_not_count(
    lay: Callable[[Tensor], Tensor], rounded: bool
) -> None:
    tensor = noise(7, 6)
    laid = lay(tensor)
    assert torch.equal(laid, tensor)
    assert of(laid, rounded=rounded) == of(tensor, rounded=rounded)


def test_the_factors_are_odd_and_those_of_each_set_its_own() -> None:
    """With even ones, changes of high bits would get lost."""
    factors = module._factors(torch.device("cpu"))
    assert bool((factors & 1).all())
    assert len(factors.unique()) > 0.999 * factors.numel()


@pytest.mark.model
def test_the_map_that_ships_names_the_embedded_model() -> None:
    weights = fingerprint(load_model("embedded").hf, rounded=True)
    head_map = shipped_map(weights)
    assert head_map is not None
    assert head_map.weights == weights
