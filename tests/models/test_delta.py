"""Delta folders: the sums are right, and anything doubtful in a folder is an input error."""

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tests.tiny import tiny_hf
from torch import Tensor

from redknot.errors import InputError
from redknot.models import LoadedModel, load_model
from redknot.models.byte_tokenizer import byte_tokenizer
from redknot.models.loading import LoadOptions

Q, DOWN, NORM = (
    "model.layers.0.self_attn.q_proj",
    "model.layers.1.mlp.down_proj",
    "model.layers.1.input_layernorm.weight",
)
GENERATOR = torch.Generator().manual_seed(0)


def whole(rows: int, columns: int, low: int, high: int) -> Tensor:
    return torch.randint(low, high + 1, (rows, columns), generator=GENERATOR)


def scales(rows: int, runs: int) -> Tensor:
    return (torch.rand(rows, runs, generator=GENERATOR) * 0.01 + 0.001).half()


def spread(values: Tensor, scale: Tensor) -> Tensor:
    """Each run of columns times its scale."""
    return values.float() * scale.float().repeat_interleave(values.shape[1] // scale.shape[1], 1)


def pack(values: Tensor) -> Tensor:
    """Two values from -8 to 7 in a byte, the first in the low nibble."""
    return ((values[:, 0::2] + 8) | (values[:, 1::2] + 8) << 4).to(torch.uint8)


FOUR, FOUR_SCALE = whole(128, 128, -8, 7), scales(128, 4)
A, A_SCALE = whole(3, 96, -127, 127).to(torch.int8), scales(3, 2)
B, B_SCALE = whole(128, 3, -127, 127).to(torch.int8), scales(128, 1)
NEW_NORM = torch.rand(128, generator=GENERATOR).bfloat16()


def tensors() -> dict[str, Tensor]:
    return {
        f"{Q}.delta.i4": pack(FOUR),
        f"{Q}.delta.scale": FOUR_SCALE,
        f"{DOWN}.lora_A.i8": A,
        f"{DOWN}.lora_A.scale": A_SCALE,
        f"{DOWN}.lora_B.i8": B,
        f"{DOWN}.lora_B.scale": B_SCALE,
        NORM: NEW_NORM,
    }


def write(folder: Path, content: dict[str, Tensor]) -> Path:
    """Two files, their checksums in the README, settings in their metadata."""
    folder.mkdir()
    names = sorted(content)
    lines = ["# A delta", ""]
    settings = [{"rope_theta": "20000.0"}, {"lora_scale": "0.5"}]
    for index, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :])):
        path = folder / f"part{index}.safetensors"
        save_file({name: content[name] for name in part}, path, settings[index])
        lines.append(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}")
    (folder / "README.md").write_text("\n".join(lines))
    return folder


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    tiny_hf(layers=2).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def opened(base: Path, delta: Path) -> LoadedModel:
    return load_model(base, LoadOptions(delta=delta))


def test_weights_are_base_plus_dequantised_differences(base: Path, tmp_path: Path) -> None:
    model = opened(base, write(tmp_path / "delta", tensors()))
    got, expected = model.hf.state_dict(), dict(tiny_hf(layers=2).state_dict())
    for name in (f"{Q}.weight", f"{DOWN}.weight"):  # deltas are trained on the base as bfloat16
        expected[name] = expected[name].bfloat16().float()
    expected[f"{Q}.weight"] = (expected[f"{Q}.weight"] + spread(FOUR, FOUR_SCALE)).bfloat16()
    low_rank = 0.5 * spread(B, B_SCALE) @ spread(A, A_SCALE)
    expected[f"{DOWN}.weight"] = (expected[f"{DOWN}.weight"] + low_rank).bfloat16()
    expected[NORM] = NEW_NORM
    assert got.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(got[name], weight.float()), name
    assert model.name == "base+delta"


def test_settings_reach_the_rotary_angles(base: Path, tmp_path: Path) -> None:
    inv_freq = opened(base, write(tmp_path / "delta", tensors())).adapter.rotary.inv_freq
    truth = 20000.0 ** -(torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    torch.testing.assert_close(inv_freq.double(), truth, rtol=1e-6, atol=0)  # 8 float32 eps


def test_checksums_may_stand_in_a_file_of_their_own(base: Path, tmp_path: Path) -> None:
    folder = write(tmp_path / "delta", tensors())
    (folder / "README.md").rename(folder / "SHA256SUMS")
    assert opened(base, folder).name == "base+delta"


@pytest.mark.parametrize("place", [0, 100, -1])
def test_a_flipped_byte_is_refused(base: Path, tmp_path: Path, place: int) -> None:
    folder = write(tmp_path / "delta", tensors())
    path = folder / "part1.safetensors"
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"part1\.safetensors.*checksum"):
        opened(base, folder)


def test_a_missing_checksum_is_refused(base: Path, tmp_path: Path) -> None:
    folder = write(tmp_path / "delta", tensors())
    (folder / "README.md").write_text("no sums here")
    with pytest.raises(InputError, match="checksum"):
        opened(base, folder)
    (folder / "README.md").unlink()
    with pytest.raises(InputError, match="checksum"):
        opened(base, folder)


def test_a_folder_without_files_is_refused(base: Path, tmp_path: Path) -> None:
    (tmp_path / "delta").mkdir()
    with pytest.raises(InputError, match="no safetensors"):
        opened(base, tmp_path / "delta")
    with pytest.raises(InputError, match="nowhere"):
        opened(base, tmp_path / "nowhere")


FOREIGN: dict[str, dict[str, Tensor | None]] = {
    "delta of fewer rows": {f"{Q}.delta.i4": pack(FOUR)[:64], f"{Q}.delta.scale": FOUR_SCALE[:64]},
    "delta of fewer columns": {f"{Q}.delta.i4": pack(FOUR)[:, :32].contiguous()},
    "scales that do not divide": {f"{Q}.delta.scale": scales(128, 5)},
    "scales of other rows": {f"{Q}.delta.scale": scales(64, 4)},
    "no scales": {f"{Q}.delta.scale": None},
    "low rank of other columns": {f"{DOWN}.lora_A.i8": A[:, :64].contiguous()},
    "low rank of two ranks": {f"{DOWN}.lora_B.i8": B[:, :2].contiguous()},
    "half a low rank": {f"{DOWN}.lora_B.i8": None, f"{DOWN}.lora_B.scale": None},
    "norm of one entry": {NORM: NEW_NORM[:1].clone()},
    "norm of fewer entries": {NORM: NEW_NORM[:64].clone()},
    "a layer too many": {"model.layers.7.input_layernorm.weight": NEW_NORM},
    "a weight that nothing reads": {f"{Q}.weight": torch.zeros(128, 128)},
    "an unknown encoding": {f"{Q}.delta.i2": torch.zeros(128, 32, dtype=torch.uint8)},
}


@pytest.mark.parametrize("fault", FOREIGN)
def test_a_delta_that_does_not_fit_is_refused(base: Path, tmp_path: Path, fault: str) -> None:
    content = tensors()
    for name, tensor in FOREIGN[fault].items():
        if tensor is None:
            del content[name]
        else:
            content[name] = tensor
    with pytest.raises(InputError):
        opened(base, write(tmp_path / "delta", content))
