"""Reads that return what lay on the disk before."""

from __future__ import annotations

from typing import ClassVar

from chaos.faults.tier_disk import CORRUPT, MISSES, DiskFault


class DiskStale(DiskFault, frozen=True, kw_only=True):
    """Reads of a block return old bytes: of the same block before it was written anew, or else of another.

    Old are the latest blocks that were deleted while the fault acts; before one is, any other that is there.
    """

    kind: ClassVar[str] = "disk_stale"
    title: ClassVar[str] = "Stale reads under the KV cache"
    order: ClassVar[int] = 64
    moves: ClassVar[tuple[str, ...]] = (CORRUPT, MISSES, "ttft")

    @property
    def struck(self) -> str:
        return "reads"
