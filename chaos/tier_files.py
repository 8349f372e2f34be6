"""The disk of the disk tier, with the faults that are in force. Its methods run on that tier's threads."""

from __future__ import annotations

import os
import random
import re
import threading
import time
from pathlib import Path
from typing import TypeVar, cast

from chaos.faults.base import Fault
from chaos.faults.tier_disk import DiskFault
from chaos.faults.tier_stale import DiskStale
from chaos.leases import Lease, Leases
from engine.kv.disk_files import Files

_BLOCK = re.compile("[0-9a-f]{64}")  # stem of a block's file; key and lock are never struck
_KEPT = 4  # deleted files that stale reads can return
_LOOK_S = 0.02  # between looks whether a fault that delays is still in force

D = TypeVar("D", bound=DiskFault)


class TierFiles(Files):
    """Does what `Files` does while no fault of the disk is in force."""

    def __init__(self, leases: Leases[Fault]) -> None:
        self._leases = leases
        self._blocks: dict[int, str] = {}  # open files that faults may act on -> names of their blocks
        self._deleted: dict[str, int] = {}  # blocks -> open files that are deleted, the oldest first
        self._lock = threading.Lock()  # of `_deleted`

    def let_go(self) -> None:
        """Close deleted files that were kept for a fault that is over."""
        if not self._in_force(DiskStale):
            with self._lock:
                while self._deleted:
                    os.close(self._deleted.popitem()[1])

    def open(self, path: Path, flags: int) -> int:
        if not (self._in_force(DiskFault) and _BLOCK.fullmatch(path.stem)):
            return super().open(path, flags)
        writes = bool(flags & (os.O_WRONLY | os.O_RDWR))
        stale = None if writes else self._stale(path)
        file = super().open(path, flags) if stale is None else stale
        self._blocks[file] = path.stem
        return file

    def close(self, file: int) -> None:
        self._blocks.pop(file, None)
        super().close(file)

    def read(self, file: int, buffer: memoryview, offset: int) -> int:
        struck = self._struck(file, offset, writes=False)
        count = super().read(file, buffer, offset)
        for lease, source in struck:
            lease.fault.read(buffer[:count], source)
        return count

    def write(self, file: int, buffer: memoryview, offset: int) -> int:
        lost = [
            lease.fault.lost(len(buffer), source) for lease, source in self._struck(file, offset, writes=True)
        ]
        lost = [gap for gap in lost if gap]
        if not lost:
            return super().write(file, buffer, offset)
        end = min((gap.start for gap in lost if gap.stop == len(buffer)), default=len(buffer))
        meant = bytes(buffer)
        for gap in lost:
            buffer[gap.start : gap.stop] = bytes(len(gap))
        if end:
            super().write(file, buffer[:end], offset)
        buffer[:] = meant
        return len(buffer)

    def unlink(self, path: Path) -> None:
        if self._in_force(DiskStale) and _BLOCK.fullmatch(path.stem):
            self._keep(path)
        super().unlink(path)

    def _in_force(self, kind: type[D]) -> list[Lease[D]]:
        """Leases of a kind of fault, by their own clock: their end needs nobody to notice it."""
        leases = self._leases.chain(time.monotonic())
        return [cast(Lease[D], lease) for lease in leases if isinstance(lease.fault, kind)]

    def _struck(self, file: int, offset: int, writes: bool) -> list[tuple[Lease[DiskFault], random.Random]]:
        """Meet a block's first call: wait, fail, or return the faults that change its bytes."""
        block = self._blocks.get(file) if offset == 0 else None
        if block is None:
            return []
        struck = [
            lease
            for lease in self._in_force(DiskFault)
            if lease.fault.acts_on(writes) and lease.fault.strikes(lease.seed, block)
        ]
        for lease in struck:
            self._delay(lease)
            if lease.fault.error is not None:
                raise OSError(lease.fault.error, os.strerror(lease.fault.error))
        return [(lease, lease.fault.source(lease.seed, block)) for lease in struck]

    def _delay(self, lease: Lease[DiskFault]) -> None:
        until = time.monotonic() + lease.fault.delay_s
        while (left := until - time.monotonic()) > 0 and lease in self._in_force(DiskFault):
            time.sleep(min(left, _LOOK_S))

    def _keep(self, path: Path) -> None:
        """Hold a file that is to be deleted open, so that what it holds can come back."""
        try:
            file = super().open(path, os.O_RDONLY)
        except OSError:
            return
        with self._lock:
            self._deleted[path.stem] = file
            while len(self._deleted) > _KEPT:
                os.close(self._deleted.pop(next(iter(self._deleted))))

    def _stale(self, path: Path) -> int | None:
        """Open old bytes in place of a block's; None: it is not struck, or there are none."""
        if not any(lease.fault.strikes(lease.seed, path.stem) for lease in self._in_force(DiskStale)):
            return None
        with self._lock:
            old = self._deleted.get(path.stem, next(reversed(self._deleted.values()), None))
            if old is not None:
                return os.dup(old)
        other = next((file for file in path.parent.glob(f"*{path.suffix}") if file != path), None)
        return None if other is None else super().open(other, os.O_RDONLY)
