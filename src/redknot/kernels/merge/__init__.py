"""Joining attention over disjoint sets of keys."""

from redknot.kernels.merge.api import merge

__all__ = ["merge"]
