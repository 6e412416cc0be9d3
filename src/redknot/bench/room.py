"""Memory between measurements: what is dropped, and pages before the clock runs."""

import gc

import torch

from redknot.execution import Executor
from redknot.execution.session import Session
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
