"""A tier with what moved to and from it, and the blocks that a sequence waits for."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from engine.kv.store import Load, Store, Times
from engine.kv.tier_policy import Pace
from engine.messages import TierStats


@dataclass(eq=False)
class Tier:
    """A store and what moved. `at_once`: its loads are ready when they are handed out."""

    name: str
    store: Store
    at_once: bool
    pace: Pace = field(default_factory=Pace)
    absent: int = 0  # blocks wanted that it did not have
    late: int = 0  # that were next when the time to wait was over
    skipped: int = 0  # blocks that left the tier above without a copy, as none was expected to pay
    loaded_bytes: int = 0
    stored_bytes: int = 0
    promoted: int = 0  # blocks that came from the tier below
    promoted_bytes: int = 0
    kept_tokens: int = 0  # of those packed for it, or handed down
    dropped_tokens: int = 0
    load_times: Times = field(default_factory=Times)
    saved_s: float = 0.0
    lost_s: float = 0.0

    def settle(self, gain_s: float) -> None:
        """Take in what a prompt has won, or lost, by waiting for this tier instead of computing."""
        self.saved_s += max(gain_s, 0.0)
        self.lost_s += max(-gain_s, 0.0)

    def stats(self, block_tokens: int) -> TierStats:
        """Levels, and counts since the start."""
        counters = self.store.counters
        return TierStats(
            tier=self.name,
            bytes_used=counters.bytes_used,
            bytes_total=self.store.capacity_bytes,
            blocks=self.store.blocks,
            tokens=self.store.blocks * block_tokens,
            hits=counters.hits,
            misses=counters.misses + self.absent,
            stores=counters.stores,
            promotions=self.promoted,
            evictions=counters.evictions,
            loaded_bytes=self.loaded_bytes,
            stored_bytes=self.stored_bytes,
            promoted_bytes=self.promoted_bytes,
            load_s=self.load_times.seconds,
            store_s=counters.store_times.seconds,
            load_counts=list(self.load_times.counts),
            store_counts=list(counters.store_times.counts),
            saved_s=self.saved_s,
            lost_s=self.lost_s,
            dropped_tokens=self.dropped_tokens,
            kept_tokens=self.kept_tokens,
            corrupt=counters.corrupt,
            late=counters.late + self.late,
            errors=counters.errors,
            collisions=counters.collisions,
            foreign=counters.foreign,
            refused=counters.refused,
            skipped=self.skipped,
        )


@dataclass(eq=False, slots=True)
class Wanted:
    """A block that a sequence waits for; `load` once it has been asked for, at `asked`.

    `compute_s` is what its tokens take to compute, 0 where that is not known.
    """

    index: int
    name: bytes
    tokens: bytes
    salt: bytes
    tier: Tier
    compute_s: float
    load: Load | None = None
    asked: float = 0.0

    def ask(self) -> None:
        """Ask the tier for it."""
        self.asked = time.monotonic()
        self.load = self.tier.store.prepare_load(self.name, self.tokens, self.salt)


@dataclass(eq=False)
class Loading:
    """The blocks that one sequence waits for, in order. Its pages from the first on are its own."""

    blocks: deque[Wanted]
    began: float
    most: int  # tokens of the prompt that may come from a tier: its last is always computed
    tokens: dict[str, int] = field(default_factory=dict)  # tokens loaded, by tier
    gains: dict[str, float] = field(default_factory=dict)  # seconds won, by tier; below 0 lost
    took: float = 0.0  # seconds, once it is over

    def __post_init__(self) -> None:
        self._settled = self.began

    def settle(self, wanted: Wanted, came: bool) -> None:
        """Count what waiting for a block since the one before it has won or lost."""
        now = time.monotonic()
        if wanted.compute_s:
            won = (wanted.compute_s if came else 0.0) - (now - self._settled)
            self.gains[wanted.tier.name] = self.gains.get(wanted.tier.name, 0.0) + won
        self._settled = now

    @property
    def ready(self) -> bool:
        """Whether the next block is there, or never will be."""
        load = self.blocks[0].load if self.blocks else None
        return load is not None and load.ready()

    @property
    def over(self) -> bool:
        """Whether nothing more will come."""
        return not self.blocks
