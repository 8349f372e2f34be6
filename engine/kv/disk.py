"""The disk tier: packed blocks in files of one folder, under a hard cap, across restarts.

The engine thread asks; threads of the store's own read and write. A read has a deadline, after which it
is a miss; what the disk does to a write concerns that write alone. What a file holds is believed only if
it is, byte for byte, what was written under that name; any other file is deleted.
"""

from __future__ import annotations

import contextlib
import logging
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.kv import block_file
from engine.kv.block_file import Label
from engine.kv.disk_files import Files
from engine.kv.disk_folder import DiskFolder
from engine.kv.disk_index import Entry, file_name
from engine.kv.disk_workers import Workers
from engine.kv.disk_writer import DiskWriter
from engine.kv.store import Counters, Found, Load, Slot

log = logging.getLogger("quaver.engine")

_MB = 1 << 20
_READERS = 2


class DiskStore:
    """A `Store` of blocks in `folder`, whose files take `capacity_mb` MiB at most.

    Blocks have `layout_bytes`, or from `smallest_bytes` on, if that is given.

    `fingerprint` names model and layout; blocks of another are deleted. At most `queue` loads wait and as
    many stores wait or are written; what comes on top is refused. A load is late `deadline_s` seconds after
    it was asked for. After a failed write nothing is written for `pause_s` seconds, twice as long after the
    next, up to a minute. What the folder holds becomes visible soon after the start.

    Methods with a `salt` take the tenant's: a block is found only under the salt it was stored under.

    Raises DiskFolderError when the folder is in use or open to others, ValueError when no block fits.
    """

    def __init__(
        self,
        folder: Path,
        *,
        layout_bytes: int,
        smallest_bytes: int | None = None,
        fingerprint: bytes,
        capacity_mb: int,
        deadline_s: float,
        queue: int = 16,
        pause_s: float = 1.0,
        files: Files | None = None,
    ) -> None:
        largest = block_file.file_bytes(layout_bytes)
        if largest > capacity_mb * _MB:
            raise ValueError(
                f"{capacity_mb} MB hold no block: the cap must be {-(-largest // _MB)} MB or more"
            )
        self._folder = DiskFolder(
            folder,
            files or Files(),
            layout_bytes=layout_bytes,
            smallest_bytes=layout_bytes if smallest_bytes is None else smallest_bytes,
            fingerprint=fingerprint,
            capacity_bytes=capacity_mb * _MB,
        )
        self._lock, self._index = self._folder.lock, self._folder.index
        self._deadline_s = deadline_s
        self._closed = self._released = False
        room = largest + block_file.SECTOR  # a sector more, to see that a file is too long
        self._readers = Workers(
            "quaver-kv-read", threads=_READERS, limit=queue, buffer_bytes=room, stuck_after_s=deadline_s / 2
        )
        self._writer = DiskWriter(self._folder, queue=queue, pause_s=pause_s, buffer_bytes=room)
        with self._lock:
            self._writer.tidy()

    @property
    def folder(self) -> Path:
        """Where the files are."""
        return self._folder.path

    @property
    def counters(self) -> Counters:
        """The store's own, kept up to date by its threads."""
        return self._folder.counters

    @property
    def blocks(self) -> int:
        """Blocks that can be read."""
        return len(self._index.entries)

    @property
    def buffers(self) -> int:
        """Blocks that may wait for the disk or be written."""
        return self._writer.queue

    @property
    def free_buffers(self) -> int:
        """How many more may now."""
        with self._lock:
            return self._writer.queue - len(self._writer.storing)

    @property
    def capacity_bytes(self) -> int:
        """What all files may take."""
        return self._index.capacity_bytes

    def ages(self) -> list[float]:
        """Seconds since each of the blocks came or was last asked for, before a restart too."""
        now = time.monotonic()
        with self._lock:
            return [now - entry.used for entry in self._index.entries.values()]

    def lookup(self, name: bytes, tokens: bytes, salt: bytes = b"") -> Found:
        """Say whether the block is here; PENDING while it is read or written."""
        label = self._folder.label(name, tokens, salt)
        with self._lock:
            entry = self._find(label)
            if entry is not None:
                return Found.PENDING if entry.loading else Found.HIT
            slot = None if self._closed else self._writer.storing.get(name)
            return Found.PENDING if slot is not None and slot.label == label else Found.MISS

    def prepare_load(self, name: bytes, tokens: bytes, salt: bytes = b"") -> Load | None:
        """Pin the block and queue the read of it."""
        label = self._folder.label(name, tokens, salt)
        with self._lock:
            entry = self._find(label)
            load = self._queued(entry) if entry is not None and not self._closed else None
            if load is None:
                self.counters.misses += 1
            return load

    def prepare_store(
        self,
        name: bytes,
        tokens: bytes,
        salt: bytes = b"",
        *,
        size: int | None = None,
        entropy: float | None = None,
    ) -> Slot | None:
        """Reserve a place in the queue. A block that is here counts as used."""
        label = self._folder.label(name, tokens, salt)
        with self._lock:
            entry = self._index.entries.get(name)
            if entry is not None:
                self._index.touch(entry)
            if self._closed or entry is not None or name in self._writer.storing:
                return None
            return self._writer.reserve(label, size or self._folder.layout_bytes)

    def discard(self, name: bytes) -> None:
        """Forget a block; its file is deleted soon. Loads that are out go on, a store comes to naught."""
        with self._lock:
            if name in self._writer.storing:
                self._writer.storing[name].wanted = False
            entry = self._index.entries.get(name)
            if entry is not None:
                self._index.remove(entry)
                self._writer.tidy()

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Wait until the folder is scanned and the stores so far are written; False after `timeout_s`."""
        return self._writer.flush(timeout_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what is queued and let go of the folder. Harmless twice.

        When the disk does not take it within `timeout_s`, the folder stays locked until the process ends.
        """
        with self._lock:
            self._closed = True
        self._readers.close(min(self._deadline_s, timeout_s))  # one that hangs changes nothing any more
        if not self._writer.close(timeout_s):
            log.error("kv disk: %s did not take the last blocks within %.0f s", self._folder.path, timeout_s)
        elif not self._released:
            self._released = True
            self._folder.release()

    def _find(self, label: Label) -> Entry | None:
        """Return the entry of that very block; None, counted, when its name means another."""
        entry = self._index.entries.get(label.name)
        if self._closed or entry is None:
            return None
        if entry.header.label == label:
            return entry
        if entry.header.label.salt != label.salt:
            self.counters.foreign += 1
        else:
            self.counters.collisions += 1
        return None

    def _queued(self, entry: Entry) -> DiskLoad | None:
        load = DiskLoad(self, entry, time.monotonic() + self._deadline_s)
        if not self._readers.put(lambda buffer: self._read(load, buffer)):
            self.counters.refused += 1
            return None
        entry.pins += 1
        entry.loading += 1
        self._index.touch(entry)
        return load

    def _read(self, load: DiskLoad, buffer: memoryview) -> None:
        """Work of a reader: read a block for a load that somebody still waits for."""
        if load.ready():
            return
        entry, began = load.entry, time.monotonic()
        block = None if self._closed else self._folder.read(entry, buffer)
        with self._lock:
            load.seconds = time.monotonic() - began
            if block is None:
                self._writer.tidy()
            self.settle(load, block)
        if block is not None:
            with contextlib.suppress(OSError):  # costs the block its place at the next start, no more
                self._folder.files.touch(self._folder.path / file_name(entry.header.label.name))

    def settle(self, load: DiskLoad, block: NDArray[np.uint8] | None) -> None:
        """End a load, unless it has ended: with its block, or as a miss. The lock is held."""
        if load.settled:
            return
        load.settled, load.block = True, block
        load.entry.loading -= 1
        if block is None:
            self.counters.misses += 1
        else:
            self.counters.hits += 1

    def poll(self, load: DiskLoad) -> bool:
        """Say whether a load has ended; it ends late at its deadline, and stalled reads hold no other up."""
        with self._lock:
            if not load.settled and time.monotonic() >= load.deadline:
                self.counters.late += 1
                self.settle(load, None)
            settled = load.settled
        if not settled:
            self._readers.replace_stuck()
        return settled

    def release(self, load: DiskLoad) -> None:
        """Unpin the entry of a load, once. One that nobody waited for is neither a hit nor a miss."""
        with self._lock:
            if load.released:
                return
            if not load.settled:
                load.settled = True
                load.entry.loading -= 1
            load.released, load.block = True, None
            load.entry.pins -= 1


class DiskLoad:
    """A `Load`. The store's lock guards it."""

    def __init__(self, store: DiskStore, entry: Entry, deadline: float) -> None:
        self.entry, self.deadline = entry, deadline
        self.settled = self.released = False
        self.block: NDArray[np.uint8] | None = None
        self.seconds = 0.0  # of the read
        self._store = store

    def ready(self) -> bool:
        """Whether the block is here, or never will be."""
        return self._store.poll(self)

    def result(self) -> NDArray[np.uint8] | None:
        """Return the block, read-only; None: it failed, was late, is not ready or has been released."""
        return self.block

    def release(self) -> None:
        """Unpin the block. A second call does nothing."""
        self._store.release(self)
