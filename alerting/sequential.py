"""Exact tests of a Bernoulli rate: the e-detector, its healthy bound and its recovery window."""

from __future__ import annotations

import importlib
import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache, lru_cache
from types import ModuleType

_RATE_MIN, _RATE_MAX = 1e-4, 0.95


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


def tail_probability(successes: int, trials: int, rate: float) -> float:
    """Return P(K ≥ successes) for K binomial with `trials` and `rate`."""
    if successes <= 0:
        return 1.0
    return float(special().bdtrc(successes - 1, trials, rate))


class EDetector:
    """Shiryaev–Roberts e-detector of a rise of a rate above p₀, mixed over alternatives.

    For each λ of a grid M ← (1 + M)(1 + λ(X − p₀)); the value is the mean over the grid. While
    P(X = 1 | past) ≤ p₀ the mean number of updates before the value reaches A is at least A.
    λ is set by the alternative rate θ it bets on: λ = (θ − p₀) / (p₀(1 − p₀)).
    """

    def __init__(self, grid: Sequence[float], cap: float = math.inf) -> None:
        """`grid` holds alternatives as shares of the way from p₀ to 1.

        Evidence stops at `cap`, so that it also falls soon; lowering it keeps the bound.
        """
        self._grid = tuple(grid)
        self._cap = cap
        self._evidence = [0.0] * len(self._grid)

    def update(self, x: bool, p0: float) -> float:
        """Take one response in and return the new value. p₀ may differ between responses."""
        self.take(x, p0)
        return self.value

    def take(self, x: bool, p0: float) -> None:
        """Take one response in."""
        now = factors(self._grid, p0)[x]
        self._evidence = [(1 + e) * factor for e, factor in zip(self._evidence, now, strict=True)]
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
        self._evidence = [0.0] * len(self._grid)


@lru_cache(maxsize=4096)
def factors(grid: tuple[float, ...], p0: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return what evidence is multiplied by when X is 0 and when it is 1, for each alternative."""
    p0 = min(max(p0, _RATE_MIN), _RATE_MAX)
    thetas = [p0 + share * (1 - p0) for share in grid]
    return tuple((1 - theta) / (1 - p0) for theta in thetas), tuple(theta / p0 for theta in thetas)


class Bank:
    """The mean of one e-detector per test, from rare and strong events to frequent and weak ones.

    A strong fault shows in the rare tests at once, a weak one in the frequent tests sooner. Whatever
    depends on what, the mean keeps the bound of its members.
    """

    def __init__(self, grid: Sequence[float], cap: float) -> None:
        self._grid = grid
        self._cap = cap
        self._detectors: dict[str, EDetector] = {}

    def update(self, tests: Mapping[str, bool], rates: Mapping[str, float]) -> None:
        """Take one response in. `rates` names every test of the bank; a test not in `tests` rests."""
        for name, rate in rates.items():
            detector = self._detectors.get(name)
            if detector is None:
                detector = self._detectors[name] = EDetector(self._grid, self._cap)
            if name in tests:
                detector.take(tests[name], rate)

    def members(self) -> Iterable[tuple[str, EDetector]]:
        """Return every test with its detector."""
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
