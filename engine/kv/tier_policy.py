"""What goes down a tier, when pages are copied ahead, and whether a block is worth loading. Pure figures."""

from __future__ import annotations

from dataclasses import dataclass

_SHARE = 0.2  # of a new measurement
_DOUBT = 0.98  # what is left of a pace each time it was too slow to be used


@dataclass(frozen=True)
class TierPolicy:
    """When blocks move.

    `disk_age_s`: a block that was wanted more recently does not go to disk: it would come back at once.
    `disk_entropy`: a block does not go to disk either unless the attention of its prompt has less
    (`engine.kv.drop.entropy_of`), where that is known; above 1 it does not matter.
    `full`, `relaxed`: shares of the page pool; above the first the pool is short of free pages, and it
    is so until it is below the second: its idle pages are copied before their room is wanted.
    `copy_all`: what leaves the pool is copied even where no copy is expected to pay (`engine.kv.reuse`).
    """

    disk_age_s: float = 0.5
    disk_entropy: float = 2.0
    full: float = 0.85
    relaxed: float = 0.80
    copy_all: bool = False

    def to_disk(self, age_s: float, entropy: float | None = None) -> bool:
        """Whether a block last wanted `age_s` ago goes to disk; by age alone without an `entropy`."""
        return age_s > self.disk_age_s and (entropy is None or entropy < self.disk_entropy)

    def short(self, share: float, was: bool) -> bool:
        """Whether a pool of which `share` is taken is short of pages; `was`: whether it was just before."""
        return share > (self.relaxed if was else self.full)


#: By the names that QUAVER_KV_POLICY takes.
PRESETS = {"age": TierPolicy(), "entropy": TierPolicy(disk_entropy=0.3)}


class Pace:
    """Seconds that a block of a tier takes, learnt from loads; 0 while nothing is known.

    Doubt lowers it a little each time it forbids a load, so that a tier is tried again some day.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    def learn(self, seconds: float) -> None:
        """Take in what a block took."""
        self.seconds += _SHARE * (seconds - self.seconds) if self.seconds else seconds

    def beats(self, compute_s: float) -> bool:
        """Whether a load is expected to end before `compute_s`; the unknown is tried."""
        if not compute_s or self.seconds < compute_s:
            return True
        self.seconds *= _DOUBT
        return False
