"""Attention that context tokens get from the probe."""

from redknot.kernels.score.api import column_mass

__all__ = ["column_mass"]
