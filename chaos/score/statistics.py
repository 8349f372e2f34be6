"""Figures of the card and their intervals: pure functions over numbers."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from alerting.sequential import rate_upper_bound
from chaos.resampling import clustered

Floats = NDArray[np.float64]

_LEVEL = 0.95


class Estimate(msgspec.Struct, frozen=True):
    """A figure with its 95 % interval; null where there is nothing to estimate it from."""

    value: float | None
    low: float | None
    high: float | None


NOTHING = Estimate(None, None, None)


def auroc(clean: Sequence[float] | Floats, struck: Sequence[float] | Floats) -> float:
    """Return the chance that a struck response scores above a clean one; ties count half."""
    values = np.concatenate([np.asarray(clean, float), np.asarray(struck, float)])
    ranks = _ranks(values)
    n, m = len(clean), len(struck)
    return float((ranks[n:].sum() - m * (m + 1) / 2) / (n * m))


def paired_auroc(clean: Floats, struck: Floats, families: Sequence[str]) -> Estimate:
    """Return the AUROC of rows that belong together (one prompt, clean and struck), by family clusters."""
    if not len(clean):
        return NOTHING
    low, high = clustered(lambda rows: auroc(clean[rows], struck[rows]), families)
    return Estimate(auroc(clean, struck), low, high)


def paired_difference(before: Floats, after: Floats, families: Sequence[str]) -> Estimate:
    """Return the mean of `after` − `before` over rows that belong together, by family clusters."""
    if not len(before):
        return NOTHING
    apart = after - before
    low, high = clustered(lambda rows: float(apart[rows].mean()), families)
    return Estimate(float(apart.mean()), low, high)


def share(events: int, trials: int) -> Estimate:
    """Return a share with its Clopper–Pearson interval."""
    if not trials:
        return NOTHING
    tail = (1 - _LEVEL) / 2
    high = rate_upper_bound(events, trials, 1 - tail)
    low = 1 - rate_upper_bound(trials - events, trials, 1 - tail)
    return Estimate(events / trials, low, high)


def mean_gap(events: int, trials: int) -> Estimate:
    """Return the mean trials from one event to the next, for events that are rare (Poisson)."""
    special: Any = importlib.import_module("scipy.special")
    tail = (1 - _LEVEL) / 2
    most, least = special.gammaincinv([events + 1, max(events, 1)], [1 - tail, tail])
    if not events:
        return Estimate(None, trials / float(most), None)
    return Estimate(trials / events, trials / float(most), trials / float(least))


def rate_upper(events: int, trials: int) -> float:
    """Return the one-sided 95 % upper bound of events per trial, for events that are rare (Poisson)."""
    special: Any = importlib.import_module("scipy.special")
    return float(special.gammaincinv(events + 1, _LEVEL)) / trials


def _ranks(values: Floats) -> Floats:
    """Ranks from 1; equal values share the mean of theirs."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    ends = np.append(starts[1:], len(values))
    ranks = np.empty(len(values))
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        ranks[order[start:end]] = (start + end + 1) / 2
    return ranks
