"""Choosing the tokens that score highest."""

from redknot.kernels.select.api import select_top

__all__ = ["select_top"]
