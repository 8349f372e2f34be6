"""The last minutes in bins of one second, for the dashboard."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.messages import EngineStats, Finish

KEPT_S = 3600
_MAX_FIRST_TOKENS = 512  # in one bin
_WINDOW_S = 10  # of rates and percentiles
_FIELDS = {
    "mean_confidence": "mean_confidence",
    "response_entropy": "response_entropy",
    "interruption_rate": "interruption_rate",
    "requests": "requests",
    "tokens_per_s": "tokens",
    "interrupted": "interrupted",
    "errors": "errors",
    "rejected": "rejected",
    "running": "running",
    "waiting": "waiting",
    "kv_used": "kv_used",
    "prompt_computed": "prompt_computed",
    "prompt_device": "prompt_device",
    "prompt_host": "prompt_host",
    "prompt_disk": "prompt_disk",
}


@dataclass(slots=True)
class Bin:
    """What happened in one second."""

    tokens: int = 0
    confidence: float = 0.0  # sum
    confident: int = 0  # tokens in it
    response_entropy: float | None = None
    interruption_rate: float | None = None
    requests: int = 0
    interrupted: int = 0
    errors: int = 0
    rejected: int = 0
    alerted: int = 0
    first_tokens: list[float] = field(default_factory=list)
    running: int | None = None
    waiting: int | None = None
    kv_used: float | None = None
    prompt_computed: int = 0  # tokens of prompts whose answer ended
    prompt_device: int = 0  # the others of them, by the tier they came from
    prompt_host: int = 0
    prompt_disk: int = 0

    @property
    def mean_confidence(self) -> float | None:
        """Over the tokens of this second that have one."""
        return self.confidence / self.confident if self.confident else None


class Live:
    """A ring of one-second bins. Canaries stay out of what users did."""

    def __init__(self) -> None:
        self._bins: OrderedDict[int, Bin] = OrderedDict()

    def at(self, time: float) -> Bin:
        """Return the bin of a unix time, made if need be; times before the ring go to its start."""
        second = int(time)
        found = self._bins.get(second)
        if found is None:
            found = self._bins[second] = Bin()
            while len(self._bins) > KEPT_S:
                self._bins.popitem(last=False)
        return found

    def tokens(self, time: float, confidence: NDArray[np.float64]) -> None:
        """Count the tokens of an engine step: their confidence [rows], NaN is absent."""
        known = confidence[~np.isnan(confidence)]
        now = self.at(time)
        now.tokens += confidence.size
        now.confidence += float(known.sum())
        now.confident += known.size

    def joint(self, time: float, entropy: float | None, interruption_rate: float | None) -> None:
        """Keep the joint inputs of now; None is blind."""
        now = self._bins.get(int(time))
        if now is None:
            if entropy is None and interruption_rate is None:
                return
            now = self.at(time)
        now.response_entropy, now.interruption_rate = entropy, interruption_rate

    def step(self, time: float, stats: EngineStats) -> None:
        """Keep the levels an engine step left behind."""
        now = self.at(time)
        now.running, now.waiting = stats.running, stats.waiting
        now.kv_used = stats.pages_used / stats.pages_total if stats.pages_total else None

    def finished(self, time: float, finish: Finish) -> None:
        """Count where the prompt of a choice came from."""
        if not finish.completion_tokens:
            return
        now, tiers = self.at(time), finish.tier_tokens
        now.prompt_computed += finish.prompt_tokens - finish.cached_tokens
        now.prompt_device += tiers.get("device", 0)
        now.prompt_host += tiers.get("host", 0)
        now.prompt_disk += tiers.get("disk", 0)

    def ended(
        self, time: float, interrupted: bool, failed: bool, alerted: bool, first_token_s: float | None
    ) -> None:
        """Count a response that ended."""
        now = self.at(time)
        now.requests += 1
        now.interrupted += interrupted
        now.errors += failed
        now.alerted += alerted
        if first_token_s is not None and len(now.first_tokens) < _MAX_FIRST_TOKENS:
            now.first_tokens.append(first_token_s)

    def series(self, now: float, seconds: int) -> dict[str, Any]:
        """Return `{"time": [...], "series": {name: [...]}}` up to `now`; null where nothing was.

        `first_token_p95`, `l1_rate` and `error_rate` look back over ten seconds.
        """
        seconds = max(1, min(seconds, KEPT_S))
        end = int(now)
        times = list(range(end - seconds + 1, end + 1))
        window = [self._bins.get(second) for second in range(times[0] - _WINDOW_S + 1, end + 1)]
        bins = window[_WINDOW_S - 1 :]
        series: dict[str, list[float | None]] = {
            name: [None if b is None else getattr(b, field) for b in bins] for name, field in _FIELDS.items()
        }
        series |= {"first_token_p95": [], "l1_rate": [], "error_rate": []}
        for index in range(len(bins)):
            recent = [b for b in window[index : index + _WINDOW_S] if b is not None]
            ended = sum(b.requests for b in recent)
            series["first_token_p95"].append(percentile([t for b in recent for t in b.first_tokens], 0.95))
            series["l1_rate"].append(sum(b.alerted for b in recent) / ended if ended else None)
            series["error_rate"].append(sum(b.errors for b in recent) / ended if ended else None)
        return {"time": times, "series": series}


def percentile(values: list[float], share: float) -> float | None:
    """Nearest-rank percentile, never above the maximum; None without values."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
