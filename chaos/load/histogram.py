"""Histograms of durations: they add up, take bounded memory, and err by at most one per cent.

No percentile lies outside what was recorded.
"""

from __future__ import annotations

import math
from collections import Counter

_GROWTH = math.log(1.02)
_FLOOR_S = 1e-6


class Histogram:
    """Counts of seconds in buckets that grow by two per cent."""

    def __init__(self) -> None:
        self.buckets: Counter[int] = Counter()
        self.count = 0
        self.total = 0.0
        self.minimum = math.inf
        self.maximum = 0.0

    def record(self, seconds: float, times: int = 1) -> None:
        """Count one duration, `times` over. Negative durations count as 0."""
        seconds = max(seconds, 0.0)
        self.buckets[round(math.log(max(seconds, _FLOOR_S)) / _GROWTH)] += times
        self.count += times
        self.total += seconds * times
        self.minimum = min(self.minimum, seconds)
        self.maximum = max(self.maximum, seconds)

    def merge(self, other: Histogram) -> None:
        """Add the counts of another histogram to this one."""
        self.buckets.update(other.buckets)
        self.count += other.count
        self.total += other.total
        self.minimum = min(self.minimum, other.minimum)
        self.maximum = max(self.maximum, other.maximum)

    def quantile(self, share: float) -> float | None:
        """Return the duration below which `share` (0…1) of the counts lie, None when empty."""
        if not self.count:
            return None
        wanted = share * self.count
        seen = 0
        for bucket in sorted(self.buckets):
            seen += self.buckets[bucket]
            if seen >= wanted:
                return min(max(_seconds(bucket), self.minimum), self.maximum)
        return self.maximum

    def shares(self) -> list[tuple[float, int]]:
        """Return the counts by duration, in order."""
        return [(_seconds(bucket), self.buckets[bucket]) for bucket in sorted(self.buckets)]

    def summary(self) -> dict[str, float | int | None]:
        """Return count, mean, p50, p90, p95, p99 and max; seconds, None when empty."""
        return {
            "count": self.count,
            "mean": self.total / self.count if self.count else None,
            "p50": self.quantile(0.50),
            "p90": self.quantile(0.90),
            "p95": self.quantile(0.95),
            "p99": self.quantile(0.99),
            "max": self.maximum if self.count else None,
        }


def _seconds(bucket: int) -> float:
    return math.exp(bucket * _GROWTH)
