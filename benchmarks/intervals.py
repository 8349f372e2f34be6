"""Medians of paired rounds, and how sure they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_DRAWS = 4000


@dataclass(frozen=True)
class Interval:
    """A median over rounds with the one-sided 95 % bounds of its bootstrap."""

    median: float
    lower95: float
    upper95: float


def of(values: Sequence[float]) -> Interval:
    """Return the median of `values`, one a round. Raises ValueError when there are none."""
    if not len(values):
        raise ValueError("no rounds")
    found = np.asarray(values, dtype=np.float64)
    draws = np.random.default_rng(0).choice(found, (_DRAWS, len(found)))
    lower, upper = np.quantile(np.median(draws, axis=1), (0.05, 0.95))
    return Interval(float(np.median(found)), float(lower), float(upper))


def ratio(values: Sequence[float], others: Sequence[float]) -> Interval:
    """Return the interval of `values` ÷ `others`, paired by round."""
    return of(np.divide(np.asarray(values), np.asarray(others)).tolist())


def loss(values: Sequence[float], others: Sequence[float]) -> Interval:
    """Return the share by which throughput `values` stays below `others`, paired by round."""
    return of((1 - np.divide(np.asarray(values), np.asarray(others))).tolist())
