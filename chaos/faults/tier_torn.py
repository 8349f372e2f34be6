"""Writes that reach the disk in part, although it says that they are done."""

from __future__ import annotations

import random
from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from chaos.faults.tier_disk import CORRUPT, MISSES, DiskFault

_SECTOR = 4096


class DiskTorn(DiskFault, frozen=True, kw_only=True):
    """Tears the file of a block when it is written: its end is missing, or some sectors hold zeros.

    The write seems good. What is torn stays so when the fault has ended, until somebody reads it.
    """

    kind: ClassVar[str] = "disk_torn"
    title: ClassVar[str] = "Torn writes under the KV cache"
    order: ClassVar[int] = 63
    moves: ClassVar[tuple[str, ...]] = (CORRUPT, MISSES, "ttft")

    how: Annotated[
        Literal["cut", "zeros"], Meta(description="the end is missing, or a range of sectors is zeros")
    ] = "cut"

    @property
    def struck(self) -> str:
        return "writes"

    def lost(self, size: int, source: random.Random) -> range:
        sectors = -(-size // _SECTOR)
        first = source.randrange(sectors)
        last = sectors if self.how == "cut" else source.randint(first + 1, sectors)
        return range(first * _SECTOR, min(last * _SECTOR, size))
