"""The FFN of some rows, added where they came from."""

from redknot.kernels.gather_ffn.api import gather_ffn

__all__ = ["gather_ffn"]
