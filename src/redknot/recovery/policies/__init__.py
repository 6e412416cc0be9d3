"""Every published method as a policy, and the parser of their names."""

from redknot.recovery.policies.cacheblend import CacheBlend
from redknot.recovery.policies.dense import Dense, Prefix
from redknot.recovery.policies.epic import Epic
from redknot.recovery.policies.heads import Duo, RedKnot
from redknot.recovery.policies.parse import POLICIES, parse_policies, parse_policy
from redknot.recovery.policies.question import LayerDrop, Question, QuestionDrop
from redknot.recovery.policies.replay import Replay
from redknot.recovery.policies.reuse import Reuse

__all__ = [
    "POLICIES",
    "CacheBlend",
    "Dense",
    "Duo",
    "Epic",
    "LayerDrop",
    "Prefix",
    "Question",
    "QuestionDrop",
    "RedKnot",
    "Replay",
    "Reuse",
    "parse_policies",
    "parse_policy",
]
