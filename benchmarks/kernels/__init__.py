"""Benchmarks of the kernels beside rival kernels: `python -m benchmarks.kernels --help`."""

import sys
import types
from pathlib import Path

try:
    import redknot  # noqa: F401
except (ImportError, AttributeError, NameError, SyntaxError):
    # Kernels are a leaf: without what the rest needs, an empty root in its place will do.
    _root = types.ModuleType("redknot")
    _root.__path__ = [str(Path(__file__).parents[2] / "src" / "redknot")]
    sys.modules["redknot"] = _root
