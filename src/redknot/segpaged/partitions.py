"""Shares of one pool by tag: quotas, watermarks and counters."""

from dataclasses import dataclass, field
from enum import StrEnum


class Tag(StrEnum):
    """What the pages of a partition are for."""

    GLOBAL = "global"
    LOCAL = "local"
    SEGMENT = "segment"
    PREFIX = "prefix"

    @property
    def number(self) -> int:
        """The partition's number in the pool."""
        return TAGS.index(self)


TAGS = tuple(Tag)


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionConfig:
    """One partition of the pool."""

    share: float
    "Quota as a share of the pool; shares of all partitions add up to at most 1."
    high: float = 0.95
    "Share of the quota above which eviction goes on to ``low``."
    low: float = 0.9
    "Share of the quota, or of the pages in use if they are more, that eviction then leaves."
    lends: bool = True
    "Whether others may use what of the quota is unused."

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ValueError(f"a share of {self.share} of the pool")
        if not 0 <= self.low <= self.high <= 1:
            raise ValueError(f"watermarks {self.low} and {self.high} are not ordered in 0 to 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionsConfig:
    """All partitions. Everything is lent, so quotas only say who gives way when memory is short."""

    global_: PartitionConfig = field(default_factory=lambda: PartitionConfig(share=0.4))
    local: PartitionConfig = field(default_factory=lambda: PartitionConfig(share=0.1))
    segment: PartitionConfig = field(default_factory=lambda: PartitionConfig(share=0.35))
    prefix: PartitionConfig = field(default_factory=lambda: PartitionConfig(share=0.15))

    def __post_init__(self) -> None:
        total = sum(self.of(tag).share for tag in TAGS)
        if total > 1 + 1e-9:
            raise ValueError(f"shares of the pool add up to {total}")

    def of(self, tag: Tag) -> PartitionConfig:
        """The settings of one partition."""
        return (self.global_, self.local, self.segment, self.prefix)[tag.number]


@dataclass(slots=True)
class Counters:
    """Pages of one partition since the start."""

    allocated: int = 0
    "Handed out."
    freed: int = 0
    "Become free, for whatever reason."
    evicted: int = 0
    "Given up by the partition's policy, for itself or for a lender."
    lent: int = 0
    "Of the quota, handed out to others."
    borrowed: int = 0
    "Handed out beyond the quota."
    called_back: int = 0
    "Of the quota, evicted by borrowers."
    refused: int = 0
    "Asked for in vain."
