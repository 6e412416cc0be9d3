"""What do we already know? Prompts, spans, keys, segment state and its store."""

from redknot.segments.identity import Namespace
from redknot.segments.lookup import Lookup, look_up
from redknot.segments.prompt import Prompt, Span
from redknot.segments.state import SegmentState
from redknot.segments.store import MemoryStore, SegmentStore
from redknot.segments.template import Document, PromptTemplate, Tokeniser

__all__ = [
    "Document",
    "Lookup",
    "MemoryStore",
    "Namespace",
    "Prompt",
    "PromptTemplate",
    "SegmentState",
    "SegmentStore",
    "Span",
    "Tokeniser",
    "look_up",
]
