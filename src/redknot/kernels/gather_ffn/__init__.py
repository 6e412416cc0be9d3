"""The FFN of some rows, added where they came from."""

from redknot.kernels.gather_ffn.api import ROW_BLOCK, gather_ffn

__all__ = ["ROW_BLOCK", "gather_ffn"]
