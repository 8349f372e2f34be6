"""The three inputs of the joint alert at their own cadences.

- mean confidence: every 100 ms, over the tokens emitted in it;
- response entropy: every 500 ms, the mean over running responses of the running mean of their
  tokens' entropies (nats);
- interruption rate: every 1 s, over the responses that ended in the last `window_s` seconds.

Everything is driven by the caller's clock: `advance` closes the windows that are over.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Name = Literal["mean_confidence", "response_entropy", "interruption_rate"]
PERIODS: dict[Name, float] = {"mean_confidence": 0.1, "response_entropy": 0.5, "interruption_rate": 1.0}


class Reading(NamedTuple):
    """A joint input now. `value` None: never had news. `blind`: no news for too long."""

    value: float | None
    time: float | None  # unix seconds of the last window that had input
    age_s: float | None
    blind: bool

    @property
    def fresh(self) -> float | None:
        """The value, if it is less than a second old."""
        return self.value if self.age_s is not None and self.age_s < 1.0 else None


class Running:
    """Running sums of the choices in progress, one row each.

    `entropy` and `tokens` are sums per row, `route` the route index, `trace` the trace id.
    """

    def __init__(self, rows: int = 64) -> None:
        self.entropy = np.zeros(rows)
        self.tokens = np.zeros(rows, np.int64)
        self.route = np.zeros(rows, np.intp)
        self.trace = np.full(rows, None, object)
        self._free = list(range(rows - 1, -1, -1))

    def take(self, route: int, trace: str) -> int:
        """Return a row for a new choice."""
        if not self._free:
            self._grow()
        row = self._free.pop()
        self.route[row], self.trace[row] = route, trace
        return row

    def give_back(self, row: int) -> None:
        """Free the row of a choice that ended."""
        self.entropy[row] = self.tokens[row] = 0
        self.trace[row] = None
        self._free.append(row)

    def add(self, rows: NDArray[np.intp], entropy: NDArray[np.float64]) -> None:
        """Add one token to each of `rows`; NaN is absent."""
        known = ~np.isnan(entropy)
        if not known.all():
            rows, entropy = rows[known], entropy[known]
        self.entropy += np.bincount(rows, entropy, minlength=self.entropy.size)
        self.tokens += np.bincount(rows, minlength=self.tokens.size)

    def _grow(self) -> None:
        rows = self.tokens.size
        self.entropy = np.concatenate([self.entropy, np.zeros(rows)])
        self.tokens = np.concatenate([self.tokens, np.zeros(rows, np.int64)])
        self.route = np.concatenate([self.route, np.zeros(rows, np.intp)])
        self.trace = np.concatenate([self.trace, np.full(rows, None, object)])
        self._free.extend(range(2 * rows - 1, rows - 1, -1))


class Joint:
    """Joint inputs per route index and for the server. Arrays are [routes + 1], the last the server."""

    def __init__(
        self, routes: int, running: Running, window_s: float = 10.0, blind_after_s: float = 3.0
    ) -> None:
        self.routes = routes
        self.running = running
        self.window_s = window_s
        self.blind_after_s = blind_after_s
        self._confidence = np.zeros(routes)
        self._tokens = np.zeros(routes, np.int64)
        self._endings: deque[tuple[float, int, bool]] = deque()
        self._window: dict[Name, int] = dict.fromkeys(PERIODS, -1)
        self.values: dict[Name, NDArray[np.float64]] = {n: np.full(routes + 1, np.nan) for n in PERIODS}
        self.times: dict[Name, NDArray[np.float64]] = {n: np.full(routes + 1, np.nan) for n in PERIODS}

    def add_tokens(self, route: NDArray[np.intp], confidence: NDArray[np.float64]) -> None:
        """Count the tokens of one step: route index and confidence [rows]; NaN is absent."""
        known = ~np.isnan(confidence)
        if not known.all():
            route, confidence = route[known], confidence[known]
        self._confidence += np.bincount(route, confidence, minlength=self.routes)
        self._tokens += np.bincount(route, minlength=self.routes)

    def add_ending(self, time: float, route: int, interrupted: bool) -> None:
        """Count a response that ended."""
        self._endings.append((time, route, interrupted))

    def over(self, now: float, name: Name = "mean_confidence") -> bool:
        """Whether a boundary was crossed since the input's last window closed; `advance` closes it."""
        return _window(name, now) > self._window[name]

    def advance(self, now: float) -> bool:
        """Close every window that is over at `now` (unix seconds); say whether there was one.

        The longer periods are multiples of the shortest one.
        """
        if not self._over("mean_confidence", now):
            return False
        self._store("mean_confidence", now, self._confidence, self._tokens)
        self._confidence[:] = 0
        self._tokens[:] = 0
        if self._over("response_entropy", now):
            active = self.running.tokens > 0
            means = self.running.entropy[active] / self.running.tokens[active]
            route = self.running.route[active]
            sums = np.bincount(route, means, minlength=self.routes)
            self._store("response_entropy", now, sums, np.bincount(route, minlength=self.routes))
        if self._over("interruption_rate", now):
            while self._endings and self._endings[0][0] <= now - self.window_s:
                self._endings.popleft()
            route = np.fromiter((ending[1] for ending in self._endings), np.intp, len(self._endings))
            broken = np.fromiter((ending[2] for ending in self._endings), np.float64, len(self._endings))
            sums = np.bincount(route, broken, minlength=self.routes)
            self._store("interruption_rate", now, sums, np.bincount(route, minlength=self.routes))
        return True

    def read(self, name: Name, now: float, route: int = -1) -> Reading:
        """Return one input for a route index; -1 is the whole server."""
        value, time = float(self.values[name][route]), float(self.times[name][route])
        if math.isnan(time):
            return Reading(None, None, None, True)
        age = max(0.0, now - time)
        return Reading(value, time, age, age > self.blind_after_s + PERIODS[name])

    def _over(self, name: Name, now: float) -> bool:
        """Whether a boundary was crossed since the last window closed."""
        crossed = self.over(now, name)
        self._window[name] = max(_window(name, now), self._window[name])
        return crossed

    def _store(self, name: Name, now: float, sums: NDArray[Any], counts: NDArray[Any]) -> None:
        """Keep the means of the routes that had input; the others keep their last value and time."""
        sums, counts = np.append(sums, sums.sum()), np.append(counts, counts.sum())
        fresh = counts > 0
        self.values[name][fresh] = sums[fresh] / counts[fresh]
        self.times[name][fresh] = now


def _window(name: Name, now: float) -> int:
    """Number of the window that `now` lies in, to 0.1 ms of a period."""
    return math.floor(now / PERIODS[name] + 1e-4)
