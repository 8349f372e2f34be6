"""Which blocks a folder holds, in the order of their last use, and what its files take. No call to the disk.

Invariant: `used` is what the files of `entries` and `dead` take, and what is reserved for files being
written. A file is counted until it is known to be gone, so that the cap holds even if it cannot be deleted.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass

from engine.kv.block_file import Header
from engine.kv.disk_files import PART

BLOCK = ".kv"


def file_name(name: bytes) -> str:
    """Name of a block's file."""
    return name.hex() + BLOCK


def part_name(name: bytes) -> str:
    """Name of the file while it is being written."""
    return name.hex() + PART


@dataclass(eq=False)
class Entry:
    """A block on disk: the header its file must have, when it was last used (`time.monotonic`), who pins
    it, and loads of it under way."""

    header: Header
    used: float
    pins: int = 0
    loading: int = 0


class DiskIndex:
    """Not thread safe: the store's lock guards it."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.used = 0
        self.entries: OrderedDict[bytes, Entry] = OrderedDict()  # the least recently used first
        self.dead: dict[str, int] = {}  # file to delete -> its bytes

    def add(self, header: Header, age_s: float = 0.0) -> None:
        """Make a block visible, the most recently used, `age_s` ago. Its bytes are `used` already."""
        name = header.label.name
        self.used -= self.dead.pop(file_name(name), 0)  # of the file that this one has replaced
        self.entries[name] = Entry(header, time.monotonic() - age_s)

    def touch(self, entry: Entry) -> None:
        """Note that a block is used."""
        entry.used = time.monotonic()
        self.entries.move_to_end(entry.header.label.name)

    def remove(self, entry: Entry) -> bool:
        """Forget a block and doom its file; False if it is not here any more."""
        name = entry.header.label.name
        if self.entries.get(name) is not entry:
            return False
        del self.entries[name]
        self.dead[file_name(name)] = entry.header.file_bytes
        return True

    def doom(self, file: str, size: int) -> None:
        """Take a file that is to be deleted, and count its `size` bytes."""
        self.used += size - self.dead.get(file, 0)
        self.dead[file] = size

    def gone(self, file: str) -> None:
        """Note that a dead file is deleted."""
        self.used -= self.dead.pop(file, 0)

    def evict(self, wanted: int) -> int:
        """Doom blocks that nobody pins until `wanted` bytes fit once the dead are gone. Returns how many."""
        over = self.used - sum(self.dead.values()) + wanted - self.capacity_bytes
        victims = []
        for entry in self.entries.values():
            if over <= 0:
                break
            if not entry.pins:
                victims.append(entry)
                over -= entry.header.file_bytes
        for entry in victims:
            self.remove(entry)
        return len(victims)

    def reserve(self, wanted: int) -> bool:
        """Count the bytes of a file to be written, if they fit."""
        if self.used + wanted > self.capacity_bytes:
            return False
        self.used += wanted
        return True

    def abandon(self, name: bytes, reserved: int) -> None:
        """Doom whatever a write that failed has left; its reservation ends."""
        self.used -= reserved
        self.doom(part_name(name), reserved)
        self.dead.setdefault(file_name(name), 0)  # a rename that reports an error may have happened
