"""What may each head see? Head maps and visible sets."""

from redknot.heads.head_map import HeadClass, HeadMap, HeadRule, Phase
from redknot.heads.visible import retained_share, visible_pairs

__all__ = [
    "HeadClass",
    "HeadMap",
    "HeadRule",
    "Phase",
    "retained_share",
    "visible_pairs",
]
