"""Attention of gathered query rows with a reach per KV head, over page tables."""

from redknot.kernels.attend.api import Impl, attend
from redknot.kernels.attend.decode import DecodePlan, attend_decode
from redknot.kernels.attend.plan import AttendPlan, Part
from redknot.kernels.attend.rows import Reach, Rows

__all__ = ["AttendPlan", "DecodePlan", "Impl", "Part", "Reach", "Rows", "attend", "attend_decode"]
