"""A claimed folder of block files: what the threads that read it and the one that writes it share."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.kv import block_file
from engine.kv.block_file import DamagedFileError, ForeignFileError, Header, Label
from engine.kv.disk_files import PART, Files, claim, folder_key, has_direct, read_whole
from engine.kv.disk_index import BLOCK, DiskIndex, Entry, file_name
from engine.kv.store import Counters

_LOST = (errno.EIO, errno.ENOENT)  # the file itself is bad or gone, not the moment


class DiskFolder:
    """`lock` guards index, counters, entries, loads and slots; nobody holds it in a call to the disk.

    Raises DiskFolderError when the folder is in use or open to others.
    """

    def __init__(
        self,
        path: Path,
        files: Files,
        *,
        layout_bytes: int,
        smallest_bytes: int,
        fingerprint: bytes,
        capacity_bytes: int,
    ) -> None:
        self.path, self.files = path.expanduser(), files
        self.layout_bytes, self._smallest_bytes = layout_bytes, smallest_bytes
        self.lock = threading.Lock()
        self.index = DiskIndex(capacity_bytes)
        self.counters = Counters()
        self._claim = claim(self.path)
        self.key = folder_key(files, self.path)
        self._fingerprint = hashlib.sha256(fingerprint).digest()
        self.direct = False

    def label(self, name: bytes, tokens: bytes, salt: bytes) -> Label:
        """Say what the header of that block must hold; neither salt nor tokens can be read from it."""
        salt_id = block_file.digest(self.key, b"salt", salt)
        return Label(self._fingerprint, salt_id, name, block_file.digest(self.key, b"tokens", tokens))

    def read(self, entry: Entry, buffer: memoryview) -> NDArray[np.uint8] | None:
        """Read a block; None, counted, when that fails. A file that is not what it should be is doomed."""
        path = self.path / file_name(entry.header.label.name)
        try:
            size = read_whole(self.files, path, buffer, self.direct)
            return block_file.decode(buffer[:size], entry.header, self.key)
        except DamagedFileError:
            self._count_lost(entry, "corrupt")
        except ForeignFileError:
            self._count_lost(entry, "foreign")
        except OSError as error:
            if error.errno in _LOST:
                self._count_lost(entry, "errors")
            else:
                self.count("errors")
        return None

    def count(self, counter: str) -> None:
        """Add one to a counter."""
        with self.lock:
            setattr(self.counters, counter, getattr(self.counters, counter) + 1)

    def scan(self, buffer: memoryview) -> None:
        """Take in what the folder holds, the most recently used first, up to the cap; doom the rest.

        Files of other names are left alone. Raises OSError when the folder cannot be listed.
        """
        blocks = []
        for name in self.files.listdir(self.path):
            if not name.endswith((BLOCK, PART)):
                continue
            try:
                status = self.files.stat(self.path / name)
            except FileNotFoundError:
                continue
            if name.endswith(PART):
                with self.lock:
                    self.index.doom(name, status.st_size)
            else:
                blocks.append((status.st_mtime_ns, name, status.st_size))
        self.direct = has_direct(self.files, self.path)
        kept = [
            (header, mtime_ns / 1e9)
            for mtime_ns, name, size in sorted(blocks, reverse=True)
            if (header := self._take_in(name, size, buffer)) is not None
        ]
        with self.lock:
            for header, used in reversed(kept):
                self.index.add(header, age_s=max(time.time() - used, 0.0))
            self.counters.bytes_used = self.index.used

    def release(self) -> None:
        """Let go of the folder."""
        os.close(self._claim)

    def _take_in(self, file: str, size: int, buffer: memoryview) -> Header | None:
        with self.lock:
            fits = self.index.reserve(size)
            if not fits:
                self.index.doom(file, size)
                self.counters.evictions += 1
                return None
        try:
            count = read_whole(self.files, self.path / file, buffer[: block_file.SECTOR], self.direct)
            header = self._checked(buffer[:count], file, size)
        except DamagedFileError:
            cause = "corrupt"
        except ForeignFileError:
            cause = "foreign"
        except OSError:
            cause = "errors"
        else:
            return header
        self.count(cause)
        with self.lock:
            self.index.used -= size
            self.index.doom(file, size)
        return None

    def _checked(self, data: memoryview, file: str, size: int) -> Header:
        header = block_file.read_header(data, self.key)
        fits = self._smallest_bytes <= header.raw <= self.layout_bytes
        if header.label.fingerprint != self._fingerprint or not fits:
            raise ForeignFileError("another model or layout")
        if file != file_name(header.label.name) or size != header.file_bytes:
            raise DamagedFileError("another name or size")
        return header

    def _count_lost(self, entry: Entry, counter: str) -> None:
        """Count why a file is lost and doom it, unless the block has been removed or written anew since."""
        with self.lock:
            lost = self.index.remove(entry)
        if lost:
            self.count(counter)
