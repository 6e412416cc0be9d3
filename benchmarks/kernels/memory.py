"""Memory: pages that the allocator holds against what future rows may see, at every step."""

from collections.abc import Iterator

import numpy as np

from redknot.kernels.attend import Reach

from .bench import Bench
from .record import Record

LAYERS, PAGE = 64, 64
CHUNK, DECODE_STEPS = 2048, 1000


def run(bench: Bench) -> None:
    """A chunked prefill of 32K tokens and 1,000 decode steps of a 64-layer model."""
    try:
        from redknot.segpaged import FutureRows, PagePool, PageTable, Retention
    except ImportError as error:
        bench.add(Record(op="memory", shape="", impl="PagePool", notes=f"not here: {error}"))
        return
    setting = bench.setting
    prompt = 2048 if setting.tiny else 32768
    window = setting.windows[0]
    reaches = setting.reaches(window) * (2 if setting.tiny else LAYERS)
    size = 16 if setting.tiny else PAGE
    pool = PagePool(len(reaches) * -(-(prompt + DECODE_STEPS) // size))
    table = PageTable(pool, len(reaches), page_size=size)
    retention = Retention.of([(FutureRows(reach),) for reach in reaches])
    wrong = steps = peak = 0
    for tokens in _steps(prompt, 256 if setting.tiny else CHUNK):
        table.append(tokens, retention)
        peak = max(peak, pool.num_used)
        table.keep(retention, table.length)
        steps += 1
        wrong += pool.num_used != visible_pages(reaches, table.length, size)
    table.check()
    every = len(reaches) * -(-table.length // size)
    page_bytes = 2 * size * setting.dim * setting.dtype.itemsize
    notes = (
        f"{steps} steps, {wrong} wrong; at the end {pool.num_used * page_bytes / 2**20:.1f} MiB"
        f" held, at most {peak * page_bytes / 2**20:.1f} MiB while a chunk was written; every"
        f" position in every head would take {every * page_bytes / 2**20:.1f} MiB"
    )
    shape = f"tokens={prompt}+{DECODE_STEPS} streams={len(reaches)} page={size} window={window}"
    bench.add(
        Record(
            op="memory",
            shape=shape,
            impl="PagePool",
            kind="count",
            samples=steps,
            ratio=pool.num_used / every,
            ratio_to="pages of all positions",
            error=wrong / steps,
            check="FAILED" if wrong else "ok",
            notes=notes,
        )
    )


def visible_pages(reaches: tuple[Reach, ...], length: int, page_size: int) -> int:
    """Pages with a held position that the row at ``length`` or a later one sees, all streams."""
    at = np.arange(length)
    known: dict[Reach, int] = {}
    for reach in set(reaches):
        seen = np.ones(length, bool)
        if reach.window is not None:
            seen = (at < reach.sink) | (at > length - reach.window)
        known[reach] = len(np.unique(at[seen] // page_size))
    return sum(known[reach] for reach in reaches)


def _steps(prompt: int, chunk: int) -> Iterator[int]:
    for start in range(0, prompt, chunk):
        yield min(chunk, prompt - start)
    yield from [1] * DECODE_STEPS
