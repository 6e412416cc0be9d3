"""Rotary angles are float32 products whatever the model's type, and right far out."""

import pytest
import torch
from tests.models.configs import EPS, gap
from tests.tiny import ROTARY, tiny_hf, tiny_model

from redknot.models.byte_tokenizer import byte_tokenizer
from redknot.models.loading import wrap_model

KINDS = [*ROTARY]


@pytest.mark.parametrize("kind", KINDS)
def test_casting_a_model_to_bfloat16_leaves_angles_in_float32(kind: str) -> None:
    exact = tiny_model(rotary=kind).adapter.rotary
    half = wrap_model(tiny_hf(rotary=kind).to(torch.bfloat16), byte_tokenizer()).adapter
    assert half.dtype is torch.bfloat16
    assert torch.equal(half.rotary.inv_freq, exact.inv_freq)
    positions = torch.tensor([255, 256, 257, 4095, 15962])
    for part in half.rotary.table(positions):
        assert part.dtype is torch.float32
    assert float(gap(half.rotary, positions, exact.inv_freq).max()) < 1e-3


def test_angles_are_float64_ones_to_half_a_unit_in_the_last_place() -> None:
    rotary = wrap_model(tiny_hf().to(torch.bfloat16), byte_tokenizer()).adapter.rotary
    plain = 10000.0 ** -(torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    near = torch.tensor([255, 256, 257, 4095, 15962])
    assert float(gap(rotary, near, plain).max()) < 1e-3
    far = torch.tensor([131071])
    angles = far[:, None].double() * rotary.inv_freq.double()
    half_ulp = torch.exp2(angles.log2().floor() - 24)
    assert bool((gap(rotary, far, rotary.inv_freq) <= half_ulp + 2 * EPS).all())


@pytest.mark.parametrize("position", [255, 256, 4095, 15962, 131070])
def test_neighbouring_positions_are_told_apart(position: int) -> None:
    rotary = wrap_model(tiny_hf().to(torch.bfloat16), byte_tokenizer()).adapter.rotary
    cosine, sine = rotary.table(torch.tensor([position, position + 1]))
    step = torch.atan2(
        sine[1] * cosine[0] - cosine[1] * sine[0], cosine[1] * cosine[0] + sine[1] * sine[0]
    )
    # Both angles are off by half an ulp; the fastest pair turns by one radian.
    assert abs(float(step[0]) - 1.0) <= EPS * (position + 1)
