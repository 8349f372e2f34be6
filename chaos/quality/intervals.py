"""Shares and differences of shares with 95 % intervals that know of families.

Replies to one family's prompts resemble each other, so intervals come from resampling whole families. With
few families, or none that differ, that is too narrow; each interval is therefore no narrower than the one
that takes replies for independent (Wilson's; for pairs Agresti and Min's).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from chaos.probes import proportion
from chaos.resampling import clustered

_Z = 1.959964


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """A share of good replies with its interval; null when there were none."""

    n: int
    good: int
    rate: float | None
    low: float | None
    high: float | None


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """What a share changed by between the same tasks asked twice: `worse` and `better` count them."""

    n: int
    worse: int
    better: int
    change: float | None
    low: float | None
    high: float | None

    @property
    def harmed(self) -> bool:
        """Tell whether the whole interval lies below no change."""
        return self.high is not None and self.high < 0


def rate(good: Sequence[bool], families: Sequence[str], seed: int = 0) -> Rate:
    """Return the share of good replies. `families` [replies]."""
    wilson = proportion(sum(good), len(good))
    if wilson.rate is None or wilson.low is None or wilson.high is None:
        return Rate(n=0, good=0, rate=None, low=None, high=None)
    found = np.asarray(good, float)
    low, high = clustered(lambda rows: float(found[rows].mean()), families, seed)
    return Rate(
        n=len(good),
        good=wilson.correct,
        rate=wilson.rate,
        low=min(low, wilson.low),
        high=max(high, wilson.high),
    )


def difference(
    before: Sequence[bool], after: Sequence[bool], families: Sequence[str], seed: int = 0
) -> Difference:
    """Return how the share of good replies changed; all three [tasks], in the same order."""
    n = len(before)
    worse = sum(b and not a for b, a in zip(before, after, strict=True))
    better = sum(a and not b for b, a in zip(before, after, strict=True))
    if not n:
        return Difference(n=0, worse=0, better=0, change=None, low=None, high=None)
    centre = (better - worse) / (n + 2)
    spread = _Z * math.sqrt(worse + better + 1 - (better - worse) ** 2 / (n + 2)) / (n + 2)
    apart = np.asarray(after, float) - np.asarray(before, float)
    low, high = clustered(lambda rows: float(apart[rows].mean()), families, seed)
    return Difference(
        n=n,
        worse=worse,
        better=better,
        change=(better - worse) / n,
        low=max(-1.0, min(low, centre - spread)),
        high=min(1.0, max(high, centre + spread)),
    )
