"""What a tier below the page pool is to those who fill it and read from it.

A store keeps packed blocks under names. Invariant: nobody is handed bytes that are not what was
stored under that very name for those very tokens; whatever is amiss is a miss and a counter, never
an exception. One thread, the engine's, calls a store; what it waits for is the store's own affair.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.messages import TIER_EDGES_S


class Found(Enum):
    """What a store knows of a name; PENDING: a load or the write of it is under way."""

    MISS = "miss"
    HIT = "hit"
    PENDING = "pending"


@dataclass
class Times:
    """What something took: seconds in all, and how often by TIER_EDGES_S."""

    seconds: float = 0.0
    counts: list[int] = field(default_factory=lambda: [0] * (len(TIER_EDGES_S) + 1))

    def add(self, seconds: float) -> None:
        """Take in one time."""
        self.seconds += seconds
        self.counts[bisect_left(TIER_EDGES_S, seconds)] += 1


@dataclass
class Counters:
    """What a store has done since it was opened; only `bytes_used` also falls.

    A hit is a load that was handed out and did not fail, a miss one that was refused or failed. `stores`
    are completed ones, `evictions` make room for others. `corrupt`, `late` and `collisions` (another
    token digest under the name) say why it was a miss; `errors` are stores and hand-overs that failed.
    `foreign`: files of another version or fingerprint, and blocks asked for under another tenant's salt;
    `refused`: loads and stores that found a full queue, no room, or a pause after an error. `store_times`
    are those of completed stores, from `prepare_store` on.
    """

    hits: int = 0
    misses: int = 0
    stores: int = 0
    evictions: int = 0
    bytes_used: int = 0
    corrupt: int = 0
    late: int = 0
    collisions: int = 0
    errors: int = 0
    foreign: int = 0
    refused: int = 0
    store_times: Times = field(default_factory=Times)


class Load(Protocol):
    """A block on its way to the caller, who must `release` it; until then it is pinned."""

    @property
    def seconds(self) -> float:
        """What fetching it took, the wait for its turn aside; 0 until that is known."""

    def ready(self) -> bool:
        """Whether `result` is final."""

    def result(self) -> NDArray[np.uint8] | None:
        """The block, to be read before `release`; None: it failed, was late or has been released."""

    def release(self) -> None:
        """Unpin the block. A second call does nothing."""


class Slot(Protocol):
    """Room for one block, which the caller fills and then must `complete`."""

    @property
    def buffer(self) -> NDArray[np.uint8]:
        """Where the block goes; the caller's until `complete`."""

    def complete(self, success: bool) -> None:
        """Make the block visible, or give the room back. A second call does nothing."""


class Store(Protocol):
    """Blocks by name. `tokens` are the block's, as little-endian int32; `salt` is the tenant's."""

    @property
    def counters(self) -> Counters:
        """The store's own, kept up to date."""

    @property
    def blocks(self) -> int:
        """Blocks that it holds."""

    @property
    def capacity_bytes(self) -> int:
        """What `bytes_used` may come to."""

    def ages(self) -> Sequence[float]:
        """Seconds since each of the blocks came or was last asked for."""

    def lookup(self, name: bytes, tokens: bytes, salt: bytes = b"") -> Found:
        """Say whether a load would be handed out now. Counts neither hits nor misses."""

    def prepare_load(self, name: bytes, tokens: bytes, salt: bytes = b"") -> Load | None:
        """Pin the block and begin to fetch it; None is a miss."""

    def prepare_store(
        self,
        name: bytes,
        tokens: bytes,
        salt: bytes = b"",
        *,
        size: int | None = None,
        entropy: float | None = None,
    ) -> Slot | None:
        """Make room for a block of `size` bytes; None: it is there, is being stored, or there is no room now.

        Without a `size` it is as large as blocks come. `entropy` is kept for the one that the block is
        handed on to, if it is.
        """

    def discard(self, name: bytes) -> None:
        """Forget a block. Loads that are out stay good until released; a store of it comes to naught."""

    def close(self) -> None:
        """Forget everything held in memory; from here on all are misses."""
