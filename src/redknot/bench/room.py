"""Memory between measurements: what is dropped, and pages before the clock runs."""

import gc

import torch

from redknot.bench.machine import GIB
from redknot.errors import InputError
from redknot.execution import Executor
from redknot.execution.cache import page_storage
from redknot.execution.session import Session
from redknot.models import Adapter
from redknot.segpaged import OutOfPages

SHORT_OF_MEMORY = (torch.OutOfMemoryError, OutOfPages, MemoryError)


def release(device: torch.device) -> None:
    """Give unreferenced memory back to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def pages_of(executor: Executor, tokens: int) -> int:
    """Pages of ``tokens`` positions in all layers and groups."""
    return rows_of(executor) * -(-tokens // executor.storage.page_size)


def rows_of(executor: Executor) -> int:
    """Rows of a page table: layers times groups."""
    return sum(shape.num_groups for shape in executor.shapes)


def make_pages(session: Session, num_pages: int) -> None:
    """Forget all state and see that there are ``num_pages``, so that no run grows any."""
    session.forget()
    release(session.model.adapter.device)
    storage = session.executor.storage
    if storage.grows and num_pages > storage.pool.num_pages:
        storage.grow(num_pages - storage.pool.num_pages)


def pool_pages(adapter: Adapter, pool_gib: float | None, reserve_gib: float) -> int:
    """Pages of the size asked for, or of all device memory but a reserve for everything else."""
    if pool_gib is not None:
        size = int(pool_gib * GIB)
    elif adapter.device.type == "cuda":
        release(adapter.device)
        size = torch.cuda.mem_get_info(adapter.device)[0] - int(reserve_gib * GIB)
    else:
        raise InputError("a CPU's memory is not all for pages: --pool-gib says how much is")
    pages = size // page_storage(adapter).page_bytes
    if pages < 1:
        raise InputError(f"no page fits into {size / GIB:.2f} GiB")
    return pages
