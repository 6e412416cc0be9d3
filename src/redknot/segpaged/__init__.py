"""Where does K/V live? Page pool, page tables and partitions."""

from redknot.segpaged.arbiter import Arbiter
from redknot.segpaged.eviction import Eviction, NoEviction, ScoredEviction, WindowEviction
from redknot.segpaged.partitions import Counters, PartitionConfig, PartitionsConfig, Tag
from redknot.segpaged.pool import CorruptPool, OutOfPages, PagePool, Provenance
from redknot.segpaged.retention import FutureRows, Retention
from redknot.segpaged.storage import PageStorage
from redknot.segpaged.table import ABSENT, Appended, PageTable, RowAllocator, Run

__all__ = [
    "ABSENT",
    "Appended",
    "Arbiter",
    "CorruptPool",
    "Counters",
    "Eviction",
    "FutureRows",
    "NoEviction",
    "OutOfPages",
    "PagePool",
    "PageStorage",
    "PageTable",
    "PartitionConfig",
    "PartitionsConfig",
    "Provenance",
    "Retention",
    "RowAllocator",
    "Run",
    "ScoredEviction",
    "Tag",
    "WindowEviction",
]
