"""Bits flipped in blocks of the KV cache that have left the pool."""

from __future__ import annotations

import random
from typing import ClassVar

from chaos.faults.base import Tier
from chaos.faults.tier_disk import CORRUPT, MISSES, Burst, DiskFault, TierFault, flip


class HostFlip(TierFault, frozen=True, kw_only=True):
    """Flips `burst` adjacent bits of a block in the host's memory, once while it is there."""

    kind: ClassVar[str] = "host_flip"
    title: ClassVar[str] = "Bits flipped in the host tier"
    tier: ClassVar[Tier | None] = "host"
    order: ClassVar[int] = 65
    moves: ClassVar[tuple[str, ...]] = (CORRUPT, MISSES, "ttft")

    burst: Burst = 1


class DiskFlip(DiskFault, frozen=True, kw_only=True):
    """Flips `burst` adjacent bits of a block each time that it is read from disk."""

    kind: ClassVar[str] = "disk_flip"
    title: ClassVar[str] = "Bits flipped in the disk tier"
    order: ClassVar[int] = 66
    moves: ClassVar[tuple[str, ...]] = (CORRUPT, MISSES, "ttft")

    burst: Burst = 1

    @property
    def struck(self) -> str:
        return "reads"

    def read(self, data: memoryview, source: random.Random) -> None:
        flip(data, self.burst, source)
