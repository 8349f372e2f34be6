"""Limits of a statistic by its healthy tail, and how often health passes them."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, NamedTuple, Self

import msgspec
import numpy as np

from alerting.rules import QuantilePreset, Statistic
from alerting.scores.fit import FOLDS
from alerting.sequential import mean_upper_bound, rate_upper_bound

L1 = "l1"  # the test of the strongest tail of all
_TAIL = 0.1  # share of the healthy values from which on a tail is taken to be exponential
_SCALE_FLOOR = 0.002  # in nats and in probability: finer differences carry no meaning


class LimitsError(ValueError):
    """No limits can be set; the message says what is missing."""


class Count(msgspec.Struct, frozen=True):
    """Events among trials."""

    events: Annotated[int, msgspec.Meta(ge=0)]
    trials: Annotated[int, msgspec.Meta(ge=0)]

    def __post_init__(self) -> None:
        if self.events > self.trials:
            raise ValueError("more events than trials")

    def upper(self, confidence: float) -> float:
        """Return the Clopper–Pearson upper bound of the rate."""
        return rate_upper_bound(self.events, self.trials, confidence)

    def others(self) -> Count:
        """Return the count of the trials without an event."""
        return Count(self.trials - self.events, self.trials)


class Tail(msgspec.Struct, frozen=True, kw_only=True):
    """One side of a statistic under health.

    `values` are sorted, negated for the low side: larger is always more suspicious. Beyond `start`,
    their 90th percentile, the tail is exponential with `scale`.
    """

    values: list[float]
    start: float
    scale: Annotated[float, msgspec.Meta(gt=0)]

    @classmethod
    def of(cls, healthy: Iterable[float], floor: float) -> Self:
        """Fit at least one healthy value; the scale is at least `floor`."""
        values = sorted(healthy)
        start = float(np.quantile(values, 1 - _TAIL))
        beyond = [value - start for value in values if value > start]
        scale = sum(beyond) / len(beyond) if beyond else 0.0
        return cls(values=values, start=start, scale=max(scale, floor))

    def score(self, value: float) -> float:
        """Return −ln of the healthy tail probability at a value (negated for the low side)."""
        if value > self.start:
            return (value - self.start) / self.scale - math.log(_TAIL)
        size = len(self.values)
        beyond = size - bisect.bisect_left(self.values, value)
        return -math.log(max(_TAIL, (beyond + 1) / (size + 1)))

    def value(self, score: float) -> float:
        """Return the value from which on the score is higher."""
        if score >= -math.log(_TAIL):
            return self.start + (score + math.log(_TAIL)) * self.scale
        return next((value for value in self.values if self.score(value) > score), self.start)


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one quantile preset in one stratum, and how often health passes them.

    Tests are named `<statistic>:<side>@<level>`, with thresholds in the statistic's unit, negated for the low
    side; `l1` is the test of the strongest tail of all, with one in −ln of a probability.
    """

    tails: dict[str, Tail]
    thresholds: dict[str, float]
    counts: dict[str, Count]  # empty while they are being counted

    def __post_init__(self) -> None:
        if L1 not in self.thresholds or (self.counts and self.counts.keys() != self.thresholds.keys()):
            raise ValueError("limits without their L1, or without their counts")

    def judge(self, statistics: Mapping[str, float], preset: QuantilePreset) -> dict[str, bool]:
        """Return, for each test, whether a response passes its limit. Absent statistics do not speak."""
        scores = tail_scores(statistics, preset.statistics, self.tails)
        if not scores:
            return {}
        tests = {
            test: _signed(statistics[s.name], s) > self.thresholds[test]
            for test, s, _ in preset.tests()
            if s.name in statistics and test in self.thresholds
        }
        return tests | {L1: max(scores.values()) > self.thresholds[L1]}

    def strongest(self, statistics: Mapping[str, float], listed: Iterable[Statistic]) -> str:
        """Return the statistic and side that lie furthest out."""
        scores = tail_scores(statistics, listed, self.tails)
        return max(scores, key=scores.__getitem__)

    def reaches_l1(self, key: str) -> float:
        """Return the value beyond which a statistic alone raises an L1; infinite where there is none."""
        tail = self.tails.get(key)
        return math.inf if tail is None else tail.value(self.thresholds[L1])


class Healthy(NamedTuple):
    """What limits are set by: the statistics of one healthy response, and the kind of its prompt, "" where
    that is not known."""

    statistics: Mapping[str, float]
    group: str


def fit_limits(healthy: Sequence[Healthy], preset: QuantilePreset, confidence: float) -> Limits:
    """Fit tails to every second healthy response, set the limit of the strongest by the others, and those of
    each statistic alone by all.

    Tails must not have seen the responses that set a limit of theirs, or these would look further in than new
    ones do. The limit of a statistic is the k-th smallest of its n values, whatever the tails: healthy
    responses pass it at a rate that is Beta(n − k + 1, k) distributed, whose upper quantiles are the
    Clopper–Pearson bounds of n − k events in n.

    Raises LimitsError when no response has any of the statistics.
    """
    listed = preset.statistics
    found = [h.statistics for h in healthy]
    tails = {s.key: tail for s in listed if (tail := _tail(found[::2], s)) is not None}
    strongest = [
        (max(scores.values()), h.group)
        for h in healthy[1::2]
        if (scores := tail_scores(h.statistics, listed, tails))
    ]
    if not strongest:
        raise LimitsError(f"no healthy response has any of {', '.join(s.name for s in listed)}")
    thresholds = {L1: strongest_limit(strongest, preset.alpha, confidence)}
    counts = {L1: Count(sum(score > thresholds[L1] for score, _ in strongest), len(strongest))}
    for test, statistic, level in preset.tests():
        own = _values(found, statistic)
        if own:
            thresholds[test] = conformal_threshold(own, level)
            counts[test] = Count(sum(value > thresholds[test] for value in own), len(own))
    return Limits(tails=tails, thresholds=thresholds, counts=counts)


def strongest_limit(healthy: Sequence[tuple[float, str]], alpha: float, confidence: float) -> float:
    """Return the lowest of some healthy scores that others pass at a rate of at most `alpha`, with
    `confidence`; the highest where there are too few to tell. Each comes with the kind of its prompt.

    The bound is Clopper and Pearson's over responses and, where every kind is known, Student's over kinds as
    well: those to come are of other kinds.
    """
    scores = np.array([score for score, _ in healthy])
    kinds = sorted({kind for _, kind in healthy})
    members = [np.array([kind == own for _, kind in healthy]) for own in kinds]
    known = "" not in kinds and len(kinds) >= FOLDS
    limit = float(scores.max())
    for candidate in np.unique(scores)[::-1]:
        passed = scores > candidate
        bound = rate_upper_bound(int(passed.sum()), len(passed), confidence)
        if known:
            bound = max(bound, mean_upper_bound([passed[own].mean() for own in members], confidence))
        if bound > alpha:
            break
        limit = float(candidate)
    return limit


def conformal_threshold(scores: list[float], alpha: float) -> float:
    """Return the ⌈(n + 1)(1 − α)⌉-th smallest score, the largest where n is too small for α."""
    rank = min(len(scores), math.ceil((len(scores) + 1) * (1 - alpha)))
    return sorted(scores)[rank - 1]


def tail_scores(
    statistics: Mapping[str, float], listed: Iterable[Statistic], tails: Mapping[str, Tail]
) -> dict[str, float]:
    """Return −ln of the healthy tail probability of each statistic that is present and may raise an L1."""
    return {
        s.key: tails[s.key].score(_signed(statistics[s.name], s))
        for s in listed
        if s.tolerated is None and s.name in statistics and s.key in tails
    }


def _tail(healthy: Iterable[Mapping[str, float]], statistic: Statistic) -> Tail | None:
    values = _values(healthy, statistic)
    return Tail.of(values, _SCALE_FLOOR) if values else None


def _values(healthy: Iterable[Mapping[str, float]], statistic: Statistic) -> list[float]:
    return [_signed(h[statistic.name], statistic) for h in healthy if statistic.name in h]


def _signed(value: float, statistic: Statistic) -> float:
    return -value if statistic.side == "low" else value
