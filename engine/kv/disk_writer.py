"""The one thread that changes a folder of block files: it scans it, writes to it and deletes from it."""

from __future__ import annotations

import errno
import logging
import time

import numpy as np
from numpy.typing import NDArray

from engine.kv import block_file
from engine.kv.block_file import Label
from engine.kv.disk_files import write_whole
from engine.kv.disk_folder import DiskFolder
from engine.kv.disk_index import file_name
from engine.kv.disk_workers import Workers

log = logging.getLogger("quaver.engine")

_MAX_PAUSE_S = 60.0


class DiskSlot:
    """A `Slot`. It takes a place in the queue until it is completed and written."""

    def __init__(self, writer: DiskWriter, label: Label, block_bytes: int) -> None:
        self.label = label
        self.wanted = True  # until the block is discarded
        self.reserved = time.monotonic()
        self._writer = writer
        self._buffer = np.empty(block_bytes, np.uint8)
        self._completed = False

    @property
    def buffer(self) -> NDArray[np.uint8]:
        """The packed block to fill; not to be touched after `complete`."""
        return self._buffer

    def complete(self, success: bool) -> None:
        """Have the block written, or give up the place."""
        if not self._completed:
            self._completed = True
            self._writer.take(self, success)


class DiskWriter:
    """Writes what slots hold, and pauses after an error, the longer the more there were in a row."""

    def __init__(self, folder: DiskFolder, *, queue: int, pause_s: float, buffer_bytes: int) -> None:
        self.storing: dict[bytes, DiskSlot] = {}  # by name, from its reservation to the end of its write
        self._folder, self.queue = folder, queue
        self._first_pause_s = self._pause_s = pause_s
        self._resume_at = 0.0
        self._scanned = False
        self._tidying = False
        # One job that tidies up may wait and another run beside the stores, so `put` finds room.
        self._thread = Workers(
            "quaver-kv-write", threads=1, limit=queue + 2, buffer_bytes=buffer_bytes, patient=True
        )
        self.flush, self.close = self._thread.flush, self._thread.close

    def reserve(self, label: Label, block_bytes: int) -> DiskSlot | None:
        """Reserve a place; None, counted, when there is none now. The folder's lock is held."""
        if len(self.storing) >= self.queue or time.monotonic() < self._resume_at:
            self._folder.counters.refused += 1
            return None
        slot = self.storing[label.name] = DiskSlot(self, label, block_bytes)
        return slot

    def take(self, slot: DiskSlot, success: bool) -> None:
        """Queue a filled slot, or give up its place."""
        with self._folder.lock:
            if not (success and self._thread.put(lambda buffer: self._store(slot, buffer))):
                del self.storing[slot.label.name]

    def tidy(self) -> None:
        """Have the folder scanned, if it is not yet, and dead files deleted. The folder's lock is held."""
        if not self._tidying:
            self._tidying = self._thread.put(self._tidy)

    def _tidy(self, buffer: memoryview) -> None:
        with self._folder.lock:
            self._tidying = False
        try:
            self._prepare(buffer)
        except OSError as error:
            self._pause(error)

    def _prepare(self, buffer: memoryview) -> None:
        """Scan the folder at first, for until then nobody knows what fits; delete dead files."""
        if not self._scanned:
            self._folder.scan(buffer)
            self._scanned = True
        self._sweep()

    def _store(self, slot: DiskSlot, buffer: memoryview) -> None:
        try:
            self._prepare(buffer)
            self._write(slot, buffer)
        except OSError as error:
            self._pause(error)
        finally:
            with self._folder.lock:
                del self.storing[slot.label.name]

    def _write(self, slot: DiskSlot, buffer: memoryview) -> None:
        """Write one block under the cap and make it visible; raises OSError, and leaves nothing behind."""
        folder, name = self._folder, slot.label.name
        with folder.lock:
            known = name in folder.index.entries  # the scan has found it since the place was reserved
        if known or not slot.wanted:
            return
        if time.monotonic() < self._resume_at:
            folder.count("refused")
            return
        header = block_file.encode(buffer, slot.buffer, slot.label, folder.key)
        size = header.file_bytes
        with folder.lock:
            folder.counters.evictions += folder.index.evict(size)
        self._sweep()
        with folder.lock:
            if not folder.index.reserve(size):
                folder.counters.refused += 1
                return
        try:
            write_whole(folder.files, folder.path / file_name(name), buffer[:size], folder.direct)
        except OSError:
            with folder.lock:
                folder.index.abandon(name, size)
            self._sweep()
            raise
        self._resume()
        with folder.lock:
            folder.index.add(header)
            folder.counters.stores += 1
            folder.counters.store_times.add(time.monotonic() - slot.reserved)
            if not slot.wanted:
                folder.index.remove(folder.index.entries[name])
        self._sweep()

    def _sweep(self) -> None:
        """Delete dead files; those that cannot be deleted stay dead, and counted."""
        folder = self._folder
        with folder.lock:
            dead = list(folder.index.dead)
        for file in dead:
            try:
                folder.files.unlink(folder.path / file)
            except FileNotFoundError:
                pass
            except OSError:
                folder.count("errors")
                continue
            with folder.lock:
                folder.index.gone(file)
        with folder.lock:
            folder.counters.bytes_used = folder.index.used

    def _pause(self, error: OSError) -> None:
        if self._pause_s == self._first_pause_s:
            cause = "the disk is full" if error.errno == errno.ENOSPC else str(error)
            log.error(
                "kv disk: cannot write to %s: %s; blocks are not kept until it can", self._folder.path, cause
            )
        self._folder.count("errors")
        self._resume_at = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)

    def _resume(self) -> None:
        if self._pause_s != self._first_pause_s:
            log.warning("kv disk: %s is written to again", self._folder.path)
        self._pause_s = self._first_pause_s
