"""Make it so: the layer loop over a loaded model, for every plan."""

from redknot.execution.cache import PromptCache
from redknot.execution.executor import ExecutionSettings, Executor, Prefilled
from redknot.execution.visibility import Visibility

__all__ = ["ExecutionSettings", "Executor", "Prefilled", "PromptCache", "Visibility"]
