"""Exact tests of a Bernoulli rate: the e-detector, its healthy bound and its recovery window."""

from __future__ import annotations

import importlib
import math
import statistics
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache, lru_cache
from types import ModuleType

_RATE_MIN, _RATE_MAX = 1e-4, 0.95
_NARROW = 1e-6  # between two rates: a density is taken for its mean


@cache
def special() -> ModuleType:
    """Return SciPy's special functions; the first call takes a third of a second."""
    return importlib.import_module("scipy.special")


@lru_cache(maxsize=4096)
def rate_upper_bound(successes: int, trials: int, confidence: float) -> float:
    """Return the Clopper–Pearson upper bound of a rate, one-sided at `confidence`; 1 without trials."""
    if successes >= trials:
        return 1.0
    return float(special().betaincinv(successes + 1, trials - successes, confidence))


def mean_upper_bound(values: Sequence[float], confidence: float) -> float:
    """Return Student's upper bound of a mean, one-sided at `confidence`, by at least two draws."""
    error = statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values) + float(special().stdtrit(len(values) - 1, confidence)) * error


def tail_probability(successes: int, trials: int, rate: float) -> float:
    """Return P(K ≥ successes) for K binomial with `trials` and `rate`."""
    if successes <= 0:
        return 1.0
    return float(special().bdtrc(successes - 1, trials, rate))


class EDetector:
    """Shiryaev–Roberts e-detector of a rise of the rate at which nested limits are passed, mixed over bets.

    What a response passes is its grade: 0 for the strictest limit, their number for none. With upper bounds
    r₀ ≤ r₁ ≤ … of the healthy rates it is a p-value known to an interval, and the bet of the power a is its
    density a·pᵃ⁻¹, averaged over that interval. For every power M ← (1 + M)·bet; the value is the mean. Bets
    fall with the grade, so while P(grade ≤ i | past) ≤ rᵢ their mean is at most 1, and the mean number
    of updates before the value reaches A is at least A. One limit alone is bet to be passed at the rate r₀ᵃ.
    """

    def __init__(self, powers: Sequence[float], cap: float = math.inf) -> None:
        """Evidence stops at `cap`, so that it also falls soon; lowering it keeps the bound."""
        self._powers = tuple(powers)
        self._cap = cap
        self._evidence = [0.0] * len(self._powers)

    def update(self, x: bool, p0: float) -> float:
        """Take one response in, whether it passes the only limit, and return the new value."""
        self.take(not x, (p0,))
        return self.value

    def take(self, grade: int, rates: tuple[float, ...]) -> None:
        """Take one response in. The rates, ascending, may differ between responses."""
        now = bets(self._powers, rates)[grade]
        self._evidence = [(1 + e) * bet for e, bet in zip(self._evidence, now, strict=True)]
        if max(self._evidence) > self._cap:
            self._evidence = [min(e, self._cap) for e in self._evidence]

    @property
    def value(self) -> float:
        """The evidence M, ≥ 0."""
        return sum(self._evidence) / len(self._evidence)

    @property
    def log(self) -> float:
        """ln max(M, 1), for display."""
        return math.log(max(self.value, 1.0))

    def reset(self) -> None:
        """Forget all evidence."""
        self._evidence = [0.0] * len(self._powers)


@lru_cache(maxsize=4096)
def bets(powers: tuple[float, ...], rates: tuple[float, ...]) -> list[list[float]]:
    """Return what evidence is multiplied by, for each grade and power; `rates` ascend."""
    found, lower = [], 0.0
    for rate in (*(min(max(rate, _RATE_MIN), _RATE_MAX) for rate in rates), 1.0):
        width = rate - lower
        found.append(
            [(rate**a - lower**a) / width if width > _NARROW else a * rate ** (a - 1) for a in powers]
        )
        lower = rate
    return found


def statistic_of(test: str) -> str:
    """Return what a test is about: tests of one statistic differ in the level behind an @."""
    return test.partition("@")[0]


class Bank:
    """The mean of one e-detector per statistic, over all levels of its tests, from rare to frequent ones.

    A strong fault shows in the rare tests at once, a weak one in the frequent tests sooner. Whatever
    depends on what, the mean keeps the bound of its members.
    """

    def __init__(
        self, powers: Sequence[float], cap: float, statistic: Callable[[str], str] = statistic_of
    ) -> None:
        """`statistic` names what a test is about: tests of one are nested, the rarer passed with the rest."""
        self._powers = powers
        self._cap = cap
        self._statistic = statistic
        self._rates: Mapping[str, float] = {}
        self._groups: list[tuple[str, list[str], tuple[float, ...]]] = []  # of these rates
        self._detectors: dict[str, EDetector] = {}

    def update(self, tests: Mapping[str, bool], rates: Mapping[str, float]) -> None:
        """Take one response in. `rates` names every test of the bank; a statistic without its tests rests."""
        if rates != self._rates:
            self._rates = dict(rates)
            self._groups = [
                (statistic, names, tuple(rates[name] for name in names))
                for statistic, names in by_statistic(rates, self._statistic).items()
            ]
        for statistic, names, bounds in self._groups:
            detector = self._detectors.get(statistic)
            if detector is None:
                detector = self._detectors[statistic] = EDetector(self._powers, self._cap)
            if names[0] in tests:
                detector.take(grade(tests, names), bounds)

    def members(self) -> Iterable[tuple[str, EDetector]]:
        """Return every statistic with its detector."""
        return self._detectors.items()

    @property
    def value(self) -> float:
        """The evidence, ≥ 0."""
        return sum(d.value for d in self._detectors.values()) / max(1, len(self._detectors))

    @property
    def log(self) -> float:
        """ln max(M, 1), for display."""
        return math.log(max(self.value, 1.0))

    def reset(self) -> None:
        """Forget all evidence."""
        for detector in self._detectors.values():
            detector.reset()


def by_statistic(
    rates: Mapping[str, float], statistic: Callable[[str], str] = statistic_of
) -> dict[str, list[str]]:
    """Return the tests of every statistic, the strictest first."""
    found: dict[str, list[str]] = {}
    for test in sorted(rates, key=rates.__getitem__):
        found.setdefault(statistic(test), []).append(test)
    return found


def grade(tests: Mapping[str, bool], names: Sequence[str]) -> int:
    """Return the place of the strictest of the tests that a response passes; their number for none."""
    return next((place for place, name in enumerate(names) if tests[name]), len(names))


class RecoveryWindow:
    """The newest responses since an alarm: are they back within the healthy range?"""

    def __init__(self, size: int) -> None:
        self._seen: deque[tuple[bool, float]] = deque(maxlen=size)

    def add(self, x: bool, p0: float) -> None:
        """Take one response in."""
        self._seen.append((x, p0))

    @property
    def full(self) -> bool:
        """True once as many responses were seen as the window holds."""
        return len(self._seen) == self._seen.maxlen

    def healthy(self, level: float) -> bool:
        """True when as many successes as these have a tail probability of at least `level` under health."""
        return _healthy(self._seen, level)

    def clear(self) -> None:
        """Start over."""
        self._seen.clear()


class BankRecovery:
    """The newest responses since an alarm, by all tests of a bank; well when they are by each.

    A test that a response does not have says nothing of it, and older responses are not asked in its place.
    """

    def __init__(self, size: int) -> None:
        self._seen: deque[list[tuple[str, bool, float]]] = deque(maxlen=size)

    def add(self, tests: Mapping[str, bool], rates: Mapping[str, float]) -> None:
        """Take one response in."""
        self._seen.append([(name, x, rates[name]) for name, x in tests.items()])

    @property
    def full(self) -> bool:
        """True once as many responses were seen as are looked at."""
        return len(self._seen) == self._seen.maxlen

    def healthy(self, level: float) -> bool:
        """True when no test has more successes than health explains."""
        by_test: dict[str, list[tuple[bool, float]]] = {}
        for response in self._seen:
            for name, x, rate in response:
                by_test.setdefault(name, []).append((x, rate))
        return all(_healthy(seen, level) for seen in by_test.values())

    def clear(self) -> None:
        """Start over."""
        self._seen.clear()


def _healthy(seen: Collection[tuple[bool, float]], level: float) -> bool:
    """Whether as many successes have a tail probability of at least `level` under the healthy rates."""
    if not seen:
        return True
    rate = sum(p0 for _, p0 in seen) / len(seen)
    return tail_probability(sum(x for x, _ in seen), len(seen), rate) >= level
