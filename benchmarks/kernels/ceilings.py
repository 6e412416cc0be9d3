"""What the machine can do at best: copies and matrix products."""

from .bench import Bench, Case
from .peers import copy_ceiling, matmul_ceiling


def run(bench: Bench) -> None:
    """A copy of 2 GiB, counting bytes read and written, and a bf16 product of random squares."""
    size_bytes, size = bench.setting.ceiling
    device = bench.setting.device
    copy, num_bytes = copy_ceiling(device, size_bytes)
    product, flops = matmul_ceiling(device, size)
    cases = [
        Case(impl="copy", make=lambda: [copy], kind="ceiling", num_bytes=num_bytes),
        Case(impl="matmul", make=lambda: [product], kind="ceiling", flops=flops),
    ]
    bench.group("ceiling", f"bytes={size_bytes} size={size}", cases, rounds=2)
