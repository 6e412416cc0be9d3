"""The command line: composes the settings of the stages; prints, and exits with 2 on bad input."""

from redknot.cli.app import main

__all__ = ["main"]
