"""Writing K/V into pages, keys rotated to their positions on the way."""

from redknot.kernels.append.api import append

__all__ = ["append"]
