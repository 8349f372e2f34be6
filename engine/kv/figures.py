"""What is told of the KV cache now and then, and no more often than it is worth."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from engine.messages import AGE_EDGES_S, TierStats

if TYPE_CHECKING:
    from engine.roster import Roster

_STATS_EVERY_S = 0.5
_AGES_EVERY_S = 5.0
_AGES_SHARE = 0.001  # of the time that counting ages may take, as it grows with what is kept


class Figures:
    """Figures of a roster's cache and tiers. Each method returns nothing until the next ones are due."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._stats_due = self._ages_due = 0.0

    def tiers(self) -> list[TierStats]:
        """Return the figures of each tier below the pool."""
        now, tiers = time.monotonic(), self._roster.tiers
        if tiers is None or now < self._stats_due:
            return []
        self._stats_due = now + _STATS_EVERY_S
        return tiers.stats()

    def ages(self) -> dict[str, list[int]]:
        """Return tokens by the time since they were last wanted (AGE_EDGES_S), for the pool and each tier."""
        began, roster = time.monotonic(), self._roster
        if began < self._ages_due:
            return {}
        found = {"device": count(roster.cache.ages(), roster.pool.page_size)}
        if roster.tiers is not None:
            for tier in roster.tiers.tiers:
                found[tier.name] = count(tier.store.ages(), roster.tiers.layout.tokens)
        took = time.monotonic() - began
        self._ages_due = began + max(_AGES_EVERY_S, took / _AGES_SHARE)
        return found


def count(ages: Sequence[float], tokens: int) -> list[int]:
    """Return how many tokens lie in each bin of AGE_EDGES_S, `tokens` for each of `ages`."""
    bins = np.searchsorted(AGE_EDGES_S, np.array(ages, np.float64), side="right")
    counts: list[int] = (tokens * np.bincount(bins, minlength=len(AGE_EDGES_S) + 1)).tolist()
    return counts
