"""Is the answer still right? Data, metrics and reports."""

from redknot.evaluation.data import Row, load_rows
from redknot.evaluation.run import EvalSettings, evaluate

__all__ = ["EvalSettings", "Row", "evaluate", "load_rows"]
