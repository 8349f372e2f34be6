"""Medians of paired rounds, and how sure they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_DRAWS = 4000


@dataclass(frozen=True)
class Interval:
    """A median over rounds, or another figure of them, with the one-sided 95 % bounds of its bootstrap."""

    median: float
    lower95: float
    upper95: float


def of(values: Sequence[float]) -> Interval:
    """Return the median of `values`, one a round. Raises ValueError when there are none."""
    if not len(values):
        raise ValueError("no rounds")
    found = np.asarray(values, dtype=np.float64)
    return _drawn(found, lambda drawn: np.median(drawn, axis=-1))


def ratio(values: Sequence[float], others: Sequence[float]) -> Interval:
    """Return the interval of `values` ÷ `others`, paired by round."""
    return of(np.divide(np.asarray(values), np.asarray(others)).tolist())


def loss(values: Sequence[float], others: Sequence[float]) -> Interval:
    """Return the share by which throughput `values` stays below `others`, paired by round."""
    return of((1 - np.divide(np.asarray(values), np.asarray(others))).tolist())


def quantile_ratio(values: Sequence[float], others: Sequence[float], share: float) -> Interval:
    """Return the `share` quantile of `values` ÷ that of `others`, as `median`; pairs are drawn together."""
    return _drawn(
        np.asarray([values, others], np.float64),
        lambda pair: np.divide(*np.quantile(pair, share, axis=-1)),
    )


def mean(values: Sequence[float]) -> Interval:
    """Return the mean of `values`, as `median`."""
    return _drawn(np.asarray(values, np.float64), lambda drawn: drawn.mean(-1))


def _drawn(values: NDArray[np.float64], figure: Callable[[NDArray[np.float64]], Any]) -> Interval:
    """`figure` of `values` over their last axis, and of draws with replacement from it."""
    places = np.random.default_rng(0).integers(0, values.shape[-1], (_DRAWS, values.shape[-1]))
    lower, upper = np.quantile(figure(values[..., places]), (0.05, 0.95))
    return Interval(float(figure(values)), float(lower), float(upper))
