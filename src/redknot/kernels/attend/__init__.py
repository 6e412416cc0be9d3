"""Attention of gathered query rows with a reach per KV head."""

from redknot.kernels.attend.api import Reach, Rows, attend

__all__ = ["Reach", "Rows", "attend"]
