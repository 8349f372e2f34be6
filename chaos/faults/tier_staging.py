"""Staging buffers that are all in use."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from chaos.faults.base import Tier
from chaos.faults.tier_disk import MISSES, REFUSED, TierFault


class DiskStaging(TierFault, frozen=True, kw_only=True):
    """Takes the buffers in which blocks wait for the disk, as they become free, and holds them to its end.

    Blocks that the host gives up meanwhile are lost; those on disk can be read.
    """

    kind: ClassVar[str] = "disk_staging"
    title: ClassVar[str] = "Staging buffers of the KV cache exhausted"
    tier: ClassVar[Tier | None] = "disk"
    order: ClassVar[int] = 67
    moves: ClassVar[tuple[str, ...]] = (REFUSED, MISSES)

    share: Annotated[float, Meta(ge=0, le=1, description="share of the buffers that are taken")] = 1.0
