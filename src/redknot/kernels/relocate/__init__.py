"""Rotation of un-rotated keys and queries to their positions."""

from redknot.kernels.relocate.api import rotate

__all__ = ["rotate"]
