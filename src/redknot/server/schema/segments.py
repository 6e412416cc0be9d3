"""The body of /v1/segments."""

from typing import Annotated

from pydantic import Field

from redknot.server.schema.common import Strict, Text

MAX_DOCUMENTS = 1024


class SegmentText(Strict):
    """A text to keep."""

    text: Text
    title: str = ""


class SegmentRequest(Strict):
    """One text, or many."""

    text: Text | None = None
    title: str = ""
    documents: (
        Annotated[list[SegmentText], Field(min_length=1, max_length=MAX_DOCUMENTS, fail_fast=True)]
        | None
    ) = None
