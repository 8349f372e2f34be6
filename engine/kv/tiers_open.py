"""The tiers that the settings ask for."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from engine.kv.checksum import checksum_by
from engine.kv.drop import DropPolicy
from engine.kv.host import HostStore
from engine.kv.int8 import BlockLayout
from engine.kv.pages import BLOCK_PAGES
from engine.kv.policy import Recompute
from engine.kv.prefix import PrefixCache
from engine.kv.tier_policy import PRESETS
from engine.kv.tiers import ASKED, Tiers
from engine.models.config import ModelConfig
from engine.settings import EngineSettings

if TYPE_CHECKING:
    from engine.kv.disk import DiskStore
    from engine.kv.disk_files import Files

log = logging.getLogger("quaver.engine")

_MB = 1 << 20
_QUEUE = 2 * ASKED  # loads that wait, and stores


def open_tiers(
    settings: EngineSettings,
    config: ModelConfig,
    cache: PrefixCache,
    *,
    fingerprint: bytes,
    recompute: Recompute,
    kernels: ctypes.CDLL | None,
    drops: bool,
    files: Callable[[], Files] | None = None,
) -> Tiers | None:
    """Open the stores below `cache`; None where there are none.

    There are none without a prefix cache, nor in deterministic mode: what comes back is not, to the last
    bit, what was computed. A folder that cannot be used is an error in the log, and no disk tier; so are more
    bytes than there can be, and no host tier.
    `drops`: the model leaves dropped tokens out of its attention; without, none are, with a warning.
    `files` makes the file system of the disk tier, if it is not to be the system's own.
    """
    if settings.deterministic or not settings.prefix_cache:
        return None
    layout = BlockLayout(
        layers=config.layers,
        tokens=BLOCK_PAGES * settings.page_size,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
    )
    host = _host(settings, layout, kernels)
    drop = DropPolicy(settings.kv_drop) if settings.kv_drop and drops else None
    if settings.kv_drop and not drops:
        log.warning("QUAVER_KV_DROP is not used: these kernels cannot leave tokens out; see docs/kv-tiers.md")
    disk = _disk(settings, layout, fingerprint, layout.partial_size(0) if drop else layout.size, files)
    if host is None and disk is None:
        return None
    return Tiers(
        cache,
        host,
        disk,
        layout,
        recompute=recompute,
        deadline_s=settings.kv_deadline_s,
        policy=PRESETS[settings.kv_policy],
        drop=drop,
        kernels=kernels,
    )


def _host(settings: EngineSettings, layout: BlockLayout, kernels: ctypes.CDLL | None) -> HostStore | None:
    capacity = settings.kv_host_mb * _MB
    if capacity < layout.size:
        return None
    try:
        return HostStore(capacity_bytes=capacity, block_bytes=layout.size, checksum=checksum_by(kernels))
    except (MemoryError, ValueError) as error:  # beyond 2**63 bytes it is a ValueError
        log.error("kv host: QUAVER_KV_HOST_MB=%d: %s; prompts are not kept there", settings.kv_host_mb, error)
        return None


def _disk(
    settings: EngineSettings,
    layout: BlockLayout,
    fingerprint: bytes,
    smallest: int,
    files: Callable[[], Files] | None,
) -> DiskStore | None:
    if settings.kv_disk_dir is None:
        return None
    from engine.kv.disk import DiskStore  # noqa: PLC0415 (LZ4 is read where it is needed alone)

    try:
        return DiskStore(
            settings.kv_disk_dir,
            layout_bytes=layout.size,
            smallest_bytes=smallest,
            fingerprint=fingerprint,
            capacity_mb=settings.kv_disk_mb,
            deadline_s=settings.kv_deadline_s,
            queue=_QUEUE,
            files=files() if files is not None else None,
        )
    except (OSError, ValueError) as error:
        log.error("kv disk: %s; prompts are not kept on disk", error)
        return None
