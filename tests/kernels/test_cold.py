"""What a process without a GPU loads and holds: no GPU package, no quadratic memory."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.kernels.inputs import DEVICE, place
from torch.profiler import ProfilerActivity, profile

import redknot.kernels
from redknot.kernels.attend import AttendPlan, Part, Reach, attend
from redknot.kernels.paging import PagedKV

COLD = """
import sys, types
package = types.ModuleType("redknot")
package.__path__ = [sys.argv[1]]
sys.modules["redknot"] = package
import torch
from redknot.kernels.append import append
from redknot.kernels.attend import AttendPlan, DecodePlan, Part, Reach, Rows, attend, attend_decode
from redknot.kernels.gather_ffn import gather_ffn
from redknot.kernels.merge import merge
from redknot.kernels.paging import PagedKV
from redknot.kernels.score import column_mass
from redknot.kernels.select import select_top
cpu = torch.device("cpu")
state = torch.randn(2, 40, 32)
kv = PagedKV.dense(state, state.clone())
rows = Rows.at(torch.tensor([3, 39]), cpu)
reaches = (Reach(), Reach(8, 4))
plan = AttendPlan.of(Part(0, rows, reaches))
query = torch.randn(4, 2, 32)
out, lse = attend(query, kv, plan, scale=0.2, return_lse=True)
attend_decode(query[:, :1].transpose(0, 1), kv, DecodePlan.of([40], reaches, cpu),
              torch.tensor([39], dtype=torch.int32), scale=0.2)
select_top(column_mass(query, kv, rows, lse, scale=0.2)[0], 3)
angle = torch.zeros(2, 16)
append(kv, state[:, :2], state[:, :2], rows.device, angle, angle)
loaded = {name.split(".")[0] for name in sys.modules}
sys.exit(", ".join(loaded & {"triton", "flash_attn", "vllm", "transformers"}) or 0)
"""


@pytest.mark.skipif(DEVICE.type != "cpu", reason="auto takes GPU packages on a GPU")
def test_the_cpu_path_loads_no_gpu_package() -> None:
    root = Path(redknot.kernels.__file__).parents[1]
    command = [sys.executable, "-c", COLD, str(root)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-500:]


def peak(num_tokens: int, reaches: tuple[Reach, ...], *, every: int, lse: bool) -> int:
    """Bytes that the torch backend holds at most, from the allocator's events."""
    generator = torch.Generator().manual_seed(0)
    kv = PagedKV.dense(*torch.randn(2, len(reaches), num_tokens, 16, generator=generator))
    rows = torch.arange(0, num_tokens, every)
    query = torch.randn(len(reaches), len(rows), 16, generator=generator)
    plan = AttendPlan.of(Part(0, place(rows), reaches))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        attend(query, kv, plan, scale=0.25, impl="torch", return_lse=lse)
    events = [e for e in found.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = highest = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        highest = max(highest, held)
    return highest


@pytest.mark.skipif(DEVICE.type != "cpu", reason="counts memory of the CPU")
@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("reach", [Reach(), Reach(256, 4), Reach(horizon=512)])
def test_memory_grows_with_the_prompt_and_not_with_its_square(
    reach: Reach, every: int, lse: bool
) -> None:
    """KN-11."""
    short, long = (peak(n, (reach,), every=every, lse=lse) for n in (4096, 8192))
    assert short > 0
    assert long < 2.6 * short
