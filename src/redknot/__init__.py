"""RedKnot: reuse of document state and head-aware K/V for Hugging Face language models."""

from redknot.errors import InputError
from redknot.heads import HeadMap
from redknot.llm import LLM, Generation, Segment, Stream
from redknot.recovery import Layout, Policy, Signals, Stage
from redknot.recovery.policies import (
    CacheBlend,
    Dense,
    Duo,
    Epic,
    LayerDrop,
    Prefix,
    Question,
    QuestionDrop,
    RedKnot,
    Reuse,
)
from redknot.segments import Document, PromptTemplate

__all__ = [
    "LLM",
    "CacheBlend",
    "Dense",
    "Document",
    "Duo",
    "Epic",
    "Generation",
    "HeadMap",
    "InputError",
    "LayerDrop",
    "Layout",
    "Policy",
    "Prefix",
    "PromptTemplate",
    "Question",
    "QuestionDrop",
    "RedKnot",
    "Reuse",
    "Segment",
    "Signals",
    "Stage",
    "Stream",
]
