"""Engines: they carry models between nodes.

`rumor.engines` has the interface and the stacked engine. `rumor.engines.processes` is the engine of real processes, and the only package
that imports torch.distributed.
"""

from rumor.engines.engine import NO_BUCKETS, Buckets, Buffer, Engine, JoinedBuckets, Lerp, Mixed, Pending, copy_all, gossip_all
from rumor.engines.stacked import PackedBuckets, Stacked, StackedBuckets

__all__ = [
    "NO_BUCKETS",
    "Buckets",
    "Buffer",
    "Engine",
    "JoinedBuckets",
    "Lerp",
    "Mixed",
    "PackedBuckets",
    "Pending",
    "Stacked",
    "StackedBuckets",
    "copy_all",
    "gossip_all",
]
