"""What the near future costs: the time of a step, the load that comes, the pool that it needs.

Plain arithmetic on what was observed; every method is told the time, nothing here reads a clock.
docs/scheduling.md explains the formulas.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final

TICK_S: Final = 0.2
WINDOW_S: Final = 10.0
#: C16's weights: how well the load is predicted, whether latency rises, how even the requests are.
PREDICTION, TREND, EVENNESS = 0.35, 0.40, 0.25
FLOOR: Final = 10
_PER_QPS = 1.8
_SMOOTHING = 0.1  # of the load, a tick; about two seconds
_SHRINKING = 0.05  # of what is too much, a tick
_TREND_TICKS, _TREND_POINTS, _RISE = 5, 5, 1.02
_MAX_SAMPLES = 1000
_MAX_IDLE_TICKS = 200  # after 40 s of silence nothing is left of the load


class StepCost:
    """Seconds of a step = what its decodes cost + so much a prompt token, learnt from steps.

    The first is a line over the number of decodes, fitted to recent steps without prompts; the
    second what recent steps with prompts took beyond it. A step may be slow for many reasons, which is
    believed by and by; it is fast for one, which is believed at once (the first steps are the slowest).
    """

    _MEMORY = 0.98
    _PROMPT_MEMORY = 0.9
    _OUTLIER = 4.0
    LEAST = 16  # prompt tokens that a step always takes, so that prompts go on
    _ROUND = 16
    _HEADROOM = 0.9  # of the time aimed at: steps differ

    def __init__(self) -> None:
        self._weight = self._decodes = self._seconds = self._square = self._product = 0.0
        self._prompts = self._prompt_seconds = 0.0

    def learn(self, prompt: int, decodes: int, seconds: float) -> None:
        """Take in a step: its prompt tokens, its decodes, how long it took."""
        if prompt:
            decoding, expected = self.decode_s(decodes), prompt * self.prompt_s
            beyond = max(seconds - decoding, 0.0)
            if seconds * self._OUTLIER < decoding + expected:
                self._prompts = self._prompt_seconds = 0.0
            elif expected:
                beyond = min(beyond, self._OUTLIER * expected)
            self._prompts = self._PROMPT_MEMORY * self._prompts + prompt
            self._prompt_seconds = self._PROMPT_MEMORY * self._prompt_seconds + beyond
        elif decodes:
            expected = self.decode_s(decodes)
            if seconds * self._OUTLIER < expected:
                self._weight = self._square = self._product = 0.0
            elif expected:
                seconds = min(seconds, self._OUTLIER * expected)
            self._learn_decode(decodes, seconds)

    def _learn_decode(self, decodes: int, seconds: float) -> None:
        """Weighted means, variance and covariance, the past fading."""
        past = self._MEMORY * self._weight
        self._weight = past + 1.0
        off, late = decodes - self._decodes, seconds - self._seconds
        self._decodes += off / self._weight
        self._seconds += late / self._weight
        self._square = self._MEMORY * self._square + off * off * past / self._weight
        self._product = self._MEMORY * self._product + off * late * past / self._weight

    def decode_s(self, decodes: int) -> float:
        """Expected seconds of a step with so many decodes and no prompt; 0 while nothing is known."""
        slope = max(self._product / self._square, 0.0) if self._square > 1e-9 else 0.0
        return max(self._seconds + slope * (decodes - self._decodes), 0.0) if decodes else 0.0

    @property
    def prompt_s(self) -> float:
        """Expected seconds a prompt token; 0 while nothing is known."""
        return self._prompt_seconds / self._prompts if self._prompts else 0.0

    def prompt_within(self, seconds: float, decodes: int) -> int | None:
        """Prompt tokens that fit into a step of `seconds` beside `decodes`, at least LEAST.

        Where decodes alone take most of it, prompts get a quarter of a longer step all the same: who
        waits for a first token would pay dearly for a promise that cannot be kept. None while a prompt
        token's cost is not known.
        """
        if not self.prompt_s:
            return None
        decoding = self.decode_s(decodes)
        left = max(self._HEADROOM * seconds - decoding, decoding / 3)
        return max(int(left / self.prompt_s) // self._ROUND * self._ROUND, self.LEAST)


class Load:
    """The load at the door, and the elastic pool of admission tokens sized by it, a tick at a time."""

    def __init__(self, now: float) -> None:
        self.qps = 0.0  # predicted arrivals a second
        self.error = 0.0  # how far arrivals stray from the prediction beyond chance, 0 … 1
        self.trend = 0.0  # how steadily p95 latency has risen of late, 0 … 1
        self.unevenness = 0.0  # coefficient of variation of tokens used by requests, 0 … 1
        self.deviation_s = 0.0  # standard deviation of latency
        self._size = float(FLOOR)
        self._next = now + TICK_S
        self._arrived = 0
        self._spread = 0.0
        self._ends: deque[tuple[float, float, int]] = deque(maxlen=_MAX_SAMPLES)
        self._p95s: deque[float] = deque(maxlen=_TREND_POINTS)
        self._ticks = 0

    @property
    def size(self) -> int:
        """Tokens of the pool."""
        return round(self._size)

    @property
    def target(self) -> float:
        """C16's formula, the burst term doubled while p95 rises steadily."""
        return max(FLOOR, _PER_QPS * self.qps) + self.qps * self.deviation_s * (1 + self.trend)

    @property
    def eagerness(self) -> float:
        """Share of the way to a larger target that the pool grows in one tick."""
        return PREDICTION * (1 - self.error) + TREND * self.trend + EVENNESS * (1 - self.unevenness)

    def arrive(self, now: float, count: int = 1) -> None:
        """Count arrivals."""
        self.advance(now)
        self._arrived += count

    def end(self, now: float, latency_s: float, tokens: int) -> None:
        """Take in a request that is over: its latency, and the tokens of prompt and answer."""
        self.advance(now)
        self._ends.append((now, latency_s, tokens))

    def advance(self, now: float) -> None:
        """Do the ticks that are due."""
        due = int((now - self._next) / TICK_S) + 1 if now >= self._next else 0
        for _ in range(min(due, _MAX_IDLE_TICKS)):
            self._tick()
        self._next += max(due - _MAX_IDLE_TICKS, 0) * TICK_S

    def _tick(self) -> None:
        self._predict(self._arrived / TICK_S)
        self._arrived = 0
        while self._ends and self._ends[0][0] < self._next - WINDOW_S:
            self._ends.popleft()
        if self._ticks % _TREND_TICKS == 0:
            self._look_back()
        self._ticks += 1
        self._next += TICK_S
        gap = self.target - self._size
        self._size += gap * (self.eagerness if gap > 0 else _SHRINKING)

    def _predict(self, rate: float) -> None:
        """Move the prediction towards the tick's rate; judge it against what Poisson arrivals would do."""
        self._spread += _SMOOTHING * ((rate - self.qps) ** 2 - self._spread)
        self.qps += _SMOOTHING * (rate - self.qps)
        chance = self.qps / TICK_S
        beyond = math.sqrt(max(self._spread - chance, 0.0))
        self.error = min(beyond / self.qps, 1.0) if self.qps > 0 else 0.0

    def _look_back(self) -> None:
        """Once a second: what the requests of the window say."""
        latencies = [latency for _, latency, _ in self._ends]
        self.deviation_s = _deviation(latencies)
        tokens = [float(count) for _, _, count in self._ends]
        mean = sum(tokens) / len(tokens) if tokens else 0.0
        self.unevenness = min(_deviation(tokens) / mean, 1.0) if mean else 0.0
        if not latencies:
            self._p95s.clear()
            self.trend = 0.0
            return
        self._p95s.append(sorted(latencies)[math.ceil(0.95 * len(latencies)) - 1])
        pairs = list(zip(self._p95s, list(self._p95s)[1:], strict=False))
        steps = sum((b > a * _RISE) - (b * _RISE < a) for a, b in pairs)
        self.trend = max(steps / (_TREND_POINTS - 1), 0.0)


def _deviation(values: list[float]) -> float:
    """Standard deviation; 0 for fewer than two values."""
    if len(values) < 2:
        return 0.0
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
