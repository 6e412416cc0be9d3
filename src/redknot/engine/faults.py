"""What may go wrong with one piece of work, and what is told about it."""

import traceback

FAULTS = Exception
"Whatever it is, it ends that work alone: libraries raise errors of their own kinds."


def told(error: BaseException) -> str:
    """One line for those who asked; lets go of the pages that frames of the failed work hold."""
    traceback.clear_frames(error.__traceback__)
    return f"{type(error).__name__}: {error}".splitlines()[0]
