"""A disk that is slow, that fails, or that is full."""

from __future__ import annotations

import errno
from typing import Annotated, ClassVar

from msgspec import Meta

from chaos.faults.tier_disk import ERRORS, LATE, MISSES, REFUSED, DiskFault, On


class DiskSlow(DiskFault, frozen=True, kw_only=True):
    """Reading and writing a block of the KV cache on disk takes `seconds` longer; 0: not at all."""

    kind: ClassVar[str] = "disk_slow"
    title: ClassVar[str] = "Slow disk under the KV cache"
    order: ClassVar[int] = 60
    moves: ClassVar[tuple[str, ...]] = (LATE, MISSES, "ttft")
    control: ClassVar[dict[str, bool | float]] = {"seconds": 0}
    caps: ClassVar[dict[str, float]] = {"seconds": 10.0}

    seconds: Annotated[float, Meta(ge=0, le=60, description="how much longer a block takes")] = 1.0
    on: On = "both"

    @property
    def struck(self) -> str:
        return self.on

    @property
    def delay_s(self) -> float:
        return self.seconds


class DiskIo(DiskFault, frozen=True, kw_only=True):
    """Reading or writing a block of the KV cache on disk fails with an I/O error (EIO)."""

    kind: ClassVar[str] = "disk_io"
    title: ClassVar[str] = "I/O errors under the KV cache"
    order: ClassVar[int] = 61
    moves: ClassVar[tuple[str, ...]] = (ERRORS, MISSES, REFUSED, "ttft")

    on: On = "both"

    @property
    def struck(self) -> str:
        return self.on

    @property
    def error(self) -> int | None:
        return errno.EIO


class DiskFull(DiskFault, frozen=True, kw_only=True):
    """Writing a block of the KV cache to disk fails for want of room (ENOSPC); reading goes on."""

    kind: ClassVar[str] = "disk_full"
    title: ClassVar[str] = "Disk full under the KV cache"
    order: ClassVar[int] = 62
    moves: ClassVar[tuple[str, ...]] = (ERRORS, REFUSED)

    @property
    def struck(self) -> str:
        return "writes"

    @property
    def error(self) -> int | None:
        return errno.ENOSPC
