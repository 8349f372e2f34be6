"""The host tier: packed blocks in memory, under a hard cap.

A block lives in one run of an arena. Invariant: a run is free, or belongs to one entry; an entry
that is forgotten while it is being stored or is pinned keeps its run until that ends. A block is believed
only if its checksum is still that of what was stored; any other is forgotten.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.kv.arena import Arena
from engine.kv.checksum import Checksum, crc32
from engine.kv.store import Counters, Found, Load, Slot

log = logging.getLogger("quaver.engine")


@dataclass(frozen=True)
class Victim:
    """A block that makes room, `age_s` seconds after it came or was last asked for.

    `entropy` is what it came with. `block` is only good until the one who is told of it returns.
    """

    name: bytes
    tokens: bytes
    salt: bytes
    age_s: float
    entropy: float | None
    block: NDArray[np.uint8]


Evicted = Callable[[Victim], None]


class Policy(Protocol):
    """Which block makes room. Names enter when their block becomes visible."""

    def used(self, name: bytes) -> None:
        """Note that a block came or was asked for."""

    def removed(self, name: bytes) -> None:
        """Forget a block."""

    def victim(self, pinned: Callable[[bytes], bool]) -> bytes | None:
        """The block that should go first among those not `pinned`; None: all are."""


class LeastRecentlyUsed:
    """The block that nobody has asked for the longest goes first."""

    def __init__(self) -> None:
        self._names: dict[bytes, None] = {}  # the least recently used first

    def used(self, name: bytes) -> None:
        self._names.pop(name, None)
        self._names[name] = None

    def removed(self, name: bytes) -> None:
        del self._names[name]

    def victim(self, pinned: Callable[[bytes], bool]) -> bytes | None:
        return next((name for name in self._names if not pinned(name)), None)


@dataclass(eq=False)
class _Entry:
    """A block, or one that is being stored. `tokens` and `salt` are kept for the next tier's own digests."""

    name: bytes
    tokens: bytes
    salt: bytes
    digest: bytes
    start: int  # of its run
    size: int
    entropy: float | None
    used: float  # when it came or was last asked for
    stored: bool = False
    checksum: int = 0  # once it is stored
    pins: int = 0


class HostStore:
    """A `Store` of blocks of `block_bytes` at most in `capacity_bytes` of memory.

    The system gives the memory only as blocks are first written to it. `evicted` gets each block that
    makes room for another; what it raises is counted and logged.
    """

    def __init__(
        self,
        *,
        capacity_bytes: int,
        block_bytes: int,
        evicted: Evicted | None = None,
        policy: Policy | None = None,
        checksum: Checksum = crc32,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counters = Counters()
        self._clock = clock
        self._checksum = checksum
        self._block_bytes = block_bytes
        self._arena = Arena(capacity_bytes if capacity_bytes >= block_bytes else 0)
        self._entries: dict[bytes, _Entry] = {}
        self._policy = policy or LeastRecentlyUsed()
        self.evicted = evicted
        self._key = secrets.token_bytes(32)
        self._closed = False

    @property
    def blocks(self) -> int:
        """Blocks that are here, or being stored."""
        return len(self._entries)

    @property
    def capacity_bytes(self) -> int:
        """Bytes of the memory."""
        return self._arena.capacity

    def ages(self) -> list[float]:
        """Seconds since each of the blocks came or was last asked for."""
        now = self._clock()
        return [now - entry.used for entry in self._entries.values()]

    def lookup(self, name: bytes, tokens: bytes, salt: bytes = b"") -> Found:
        """Whether the block is here; PENDING while it is being stored."""
        entry = self._find(name, tokens, salt)
        if entry is None:
            return Found.MISS
        return Found.HIT if entry.stored else Found.PENDING

    def prepare_load(self, name: bytes, tokens: bytes, salt: bytes = b"") -> Load | None:
        """Pin a block, which is ready at once."""
        entry = self._find(name, tokens, salt)
        if entry is None or not entry.stored:
            self.counters.misses += 1
            return None
        self._touch(entry)
        entry.pins += 1
        return _Load(self, entry)

    def prepare_store(
        self,
        name: bytes,
        tokens: bytes,
        salt: bytes = b"",
        *,
        size: int | None = None,
        entropy: float | None = None,
    ) -> Slot | None:
        """Reserve memory, evicting blocks until there is enough in one piece.

        A block that is here counts as used. `entropy` goes to whoever is told of the block's eviction.
        """
        entry = self._entries.get(name)
        if entry is not None:
            if entry.stored:
                self._touch(entry)
            return None
        size = size or self._block_bytes
        start = self._room(size)
        if start is None:
            return None
        digest = self._digest(tokens, salt)
        entry = _Entry(name, tokens, salt, digest, start, size, entropy, self._clock())
        self._entries[name] = entry
        self.counters.bytes_used += size
        return _Slot(self, entry)

    def discard(self, name: bytes) -> None:
        """Forget a block; its memory is free once nobody reads or writes it."""
        entry = self._entries.get(name)
        if entry is not None:
            self._forget(entry)

    def newest(self) -> list[bytes]:
        """Names of the blocks that are here, from the last to be used to the first."""
        stored = [entry for entry in self._entries.values() if entry.stored]
        return [entry.name for entry in sorted(stored, key=lambda entry: entry.used, reverse=True)]

    def contents(self) -> Iterator[tuple[bytes, NDArray[np.uint8]]]:
        """Names of the blocks that are here and their bytes, which faults alone may write to."""
        for entry in self._entries.values():
            if entry.stored:
                yield entry.name, self._arena.view(entry.start, entry.size)

    def evict(self, name: bytes | None = None) -> bool:
        """Hand on a block, by its name or as the policy says, and free its memory.

        False if it, or every one, is pinned, being stored or not here.
        """
        if name is None:
            name = self._policy.victim(lambda name: self._entries[name].pins > 0)
        entry = None if name is None else self._entries.get(name)
        if entry is None or not entry.stored or entry.pins:
            return False
        name = entry.name
        del self._entries[name]
        self._policy.removed(name)
        self.counters.evictions += 1
        self._hand_on(entry)
        self._give_back(entry)
        return True

    def close(self) -> None:
        """Forget all blocks, without handing them on, and take no more."""
        for entry in list(self._entries.values()):
            self._forget(entry)
        self._closed = True
        self._arena = Arena(0)  # the memory goes once nobody reads or writes a block

    def _room(self, size: int) -> int | None:
        start = self._arena.take(size)
        while start is None and not self._closed and self.evict():
            start = self._arena.take(size)
        return start

    def _touch(self, entry: _Entry) -> None:
        entry.used = self._clock()
        self._policy.used(entry.name)

    def _find(self, name: bytes, tokens: bytes, salt: bytes) -> _Entry | None:
        entry = self._entries.get(name)
        if entry is not None and not hmac.compare_digest(entry.digest, self._digest(tokens, salt)):
            self.counters.collisions += 1
            return None
        return entry

    def _digest(self, tokens: bytes, salt: bytes) -> bytes:
        """The tokens of all blocks are as many, so that they and the salt cannot be taken for others."""
        return hashlib.blake2b(salt + tokens, key=self._key, digest_size=16).digest()

    def _hand_on(self, entry: _Entry) -> None:
        block = self._block(entry)
        if self.evicted is None or not self._sound(entry, block):
            return
        try:
            age_s = self._clock() - entry.used
            self.evicted(Victim(entry.name, entry.tokens, entry.salt, age_s, entry.entropy, block))
        except Exception:
            self.counters.errors += 1
            log.exception("an evicted KV block could not be handed on")

    def _block(self, entry: _Entry) -> NDArray[np.uint8]:
        """The entry's bytes, to read."""
        block = self._arena.view(entry.start, entry.size)
        block.flags.writeable = False
        return block

    def _sound(self, entry: _Entry, block: NDArray[np.uint8]) -> bool:
        """Whether a block is still what was stored; one that is not is counted and forgotten."""
        if self._checksum(block) == entry.checksum:
            return True
        self.counters.corrupt += 1
        if self._entries.get(entry.name) is entry:
            self._forget(entry)
        return False

    def _read(self, entry: _Entry, block: NDArray[np.uint8]) -> bool:
        """Count a load that somebody wants the block of; whether that is sound."""
        sound = self._sound(entry, block)
        self.counters.hits += sound
        self.counters.misses += not sound
        return sound

    def _forget(self, entry: _Entry) -> None:
        del self._entries[entry.name]
        if entry.stored:
            self._policy.removed(entry.name)
            if not entry.pins:
                self._give_back(entry)

    def _complete(self, entry: _Entry, block: NDArray[np.uint8], success: bool) -> None:
        if self._entries.get(entry.name) is not entry:  # forgotten meanwhile
            self._give_back(entry)
        elif success:
            entry.stored, entry.checksum = True, self._checksum(block)
            self.counters.stores += 1
            self.counters.store_times.add(self._clock() - entry.used)
            self._touch(entry)
        else:
            self.counters.errors += 1
            self._forget(entry)
            self._give_back(entry)

    def _unpin(self, entry: _Entry) -> None:
        entry.pins -= 1
        if not entry.pins and self._entries.get(entry.name) is not entry:
            self._give_back(entry)

    def _give_back(self, entry: _Entry) -> None:
        if not self._closed:
            self._arena.give(entry.start, entry.size)
        self.counters.bytes_used -= entry.size


class _Load:
    """A pinned entry; none once it is released. One whose block nobody asked for is neither hit nor miss."""

    seconds = 0.0

    def __init__(self, store: HostStore, entry: _Entry) -> None:
        self._block = store._block(entry)
        self._store = store
        self._entry: _Entry | None = entry
        self._sound: bool | None = None  # until somebody asks

    def ready(self) -> bool:
        return True

    def result(self) -> NDArray[np.uint8] | None:
        if self._entry is None:
            return None
        if self._sound is None:
            self._sound = self._store._read(self._entry, self._block)
        return self._block if self._sound else None

    def release(self) -> None:
        entry, self._entry = self._entry, None
        if entry is not None:
            self._store._unpin(entry)


class _Slot:
    """An entry that is being stored; none once that is over."""

    def __init__(self, store: HostStore, entry: _Entry) -> None:
        self.buffer = store._arena.view(entry.start, entry.size)
        self._store = store
        self._entry: _Entry | None = entry

    def complete(self, success: bool) -> None:
        entry, self._entry = self._entry, None
        if entry is not None:
            self._store._complete(entry, self.buffer, success)
