"""Measure heads: which groups need the whole context?"""

from redknot.profiling.run import ProfileSettings, profile

__all__ = ["ProfileSettings", "profile"]
