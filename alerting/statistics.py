"""From token signals to a few numbers per response.

Choice 0 stands for its response. The first sentence counts apart, for the text after it rambles;
where none ends within `SENTENCE_TOKENS` the first so many tokens stand for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from math import isfinite
from typing import Literal

from alerting.scores.response import ALLOWANCE, SENTENCE_TOKENS
from engine.messages import TOKEN_SIGNALS

_SURPRISAL = TOKEN_SIGNALS.index("surprisal")
_CONFIDENCE = TOKEN_SIGNALS.index("confidence")
_ENTROPY = TOKEN_SIGNALS.index("entropy")
_ENTROPY_POST = TOKEN_SIGNALS.index("entropy_post")

Band = Literal["greedy", "low", "middle", "high"]
#: What the bands are, for people.
BANDS: dict[str, str] = {
    "greedy": "temperature 0",
    "low": "temperature up to 0.5",
    "middle": "temperature up to 1",
    "high": "temperature above 1",
}


def temperature_band(temperature: float) -> Band:
    """Return the stratum of a sampling temperature: 0, ≤ 0.5, ≤ 1, above."""
    if temperature <= 0:
        return "greedy"
    if temperature <= 0.5:
        return "low"
    return "middle" if temperature <= 1 else "high"


class _Sums:
    """Running sums of confidence, entropy, excess surprisal and post-tap entropy."""

    __slots__ = ("confidence", "count", "entropy", "entropy_post", "excess", "post")

    def __init__(self) -> None:
        self.count = self.post = 0
        self.confidence = self.entropy = self.excess = self.entropy_post = 0.0

    def add(self, row: Sequence[float]) -> None:
        entropy, post = row[_ENTROPY], row[_ENTROPY_POST]
        self.count += 1
        self.confidence += row[_CONFIDENCE]
        self.entropy += entropy
        self.excess += row[_SURPRISAL] - entropy
        if isfinite(post):
            self.post += 1
            self.entropy_post += post

    def means(self, prefix: str) -> dict[str, float]:
        if not self.count:
            return {}
        means = {
            f"{prefix}_confidence": self.confidence / self.count,
            f"{prefix}_entropy": self.entropy / self.count,
            f"{prefix}_excess": self.excess / self.count,
        }
        if self.post:
            means[f"{prefix}_entropy_post"] = self.entropy_post / self.post
        return means


class ResponseTracker:
    """The signals of one response while it streams.

    `surprisal` is a healthy token's, in nats: the CUSUM climbs on what is above it. Without it there is none.
    """

    __slots__ = (
        "_early",
        "_last",
        "_last_but_one",
        "_peak",
        "_reference",
        "_run",
        "_walk",
        "_whole",
        "cusum",
        "missing",
        "sentence",
        "sentence_tokens",
    )

    def __init__(self, surprisal: float | None = None) -> None:
        self._reference = math.inf if surprisal is None else surprisal + ALLOWANCE
        self._walk = 0.0
        self.cusum = 0.0  # its maximum so far
        self._last = self._last_but_one = -math.inf  # excess surprisals, for the short window
        self._peak = -math.inf  # highest sum of a window
        self._early: list[Sequence[float]] | None = []  # rows not yet known to be past the sentence
        self._whole = _Sums()
        self._run: dict[float, int] = {}
        self.sentence: dict[str, float] = {}
        self.sentence_tokens: int | None = None
        self.missing = 0  # tokens without signals

    def add(self, row: Sequence[float]) -> None:
        """Take one token in; `row` is ordered as `TOKEN_SIGNALS`."""
        surprisal, entropy = row[_SURPRISAL], row[_ENTROPY]
        if not isfinite(surprisal + entropy + row[_CONFIDENCE]):
            self.missing += 1
            return
        self._whole.add(row)
        walk = self._walk + surprisal - self._reference
        self._walk = walk if walk > 0 else 0.0
        if walk > self.cusum:  # noqa: PLR1730 - a call of max() per token is dear
            self.cusum = walk
        excess = surprisal - entropy
        window = excess + self._last + self._last_but_one
        self._last_but_one, self._last = self._last, excess
        if window > self._peak:  # noqa: PLR1730
            self._peak = window
        for limit in self._run:
            self._run[limit] = self._run[limit] + 1 if row[_CONFIDENCE] < limit else 0
        if self._early is not None:
            self._early.append(row)
            self._close_sentence()

    def watch_run(self, confidence: float) -> None:
        """Count consecutive tokens below `confidence` from now on."""
        self._run[confidence] = 0

    def run_below(self, confidence: float) -> int:
        """Return how many of the newest tokens in a row lie below a watched confidence."""
        return self._run[confidence]

    def end_sentence(self, tokens: int) -> None:
        """The first sentence is the first `tokens` tokens."""
        if self.sentence_tokens is None:
            self.sentence_tokens = max(1, min(tokens, SENTENCE_TOKENS))
            self._close_sentence()

    def finish(self) -> None:
        """No more tokens follow: what there is stands for the first sentence."""
        if self._early:
            self.sentence_tokens = min(self.sentence_tokens or len(self._early), len(self._early))
            self._close_sentence()

    @property
    def tokens(self) -> int:
        """Tokens with signals."""
        return self._whole.count

    @property
    def mean_entropy(self) -> float:
        """Running mean entropy in nats; 0 before the first token."""
        return self._whole.entropy / self._whole.count if self._whole.count else 0.0

    def whole(self) -> dict[str, float]:
        """Return the statistics over all tokens so far."""
        means = self._whole.means("response")
        if not means:
            return {}
        short = self._peak / 3 if isfinite(self._peak) else means["response_excess"]
        means["window_excess"] = short
        if isfinite(self._reference):
            means["cusum"] = self.cusum
        return means

    def _close_sentence(self) -> None:
        if self._early is None or len(self._early) < (self.sentence_tokens or SENTENCE_TOKENS):
            return
        sums = _Sums()
        for row in self._early[: self.sentence_tokens or SENTENCE_TOKENS]:
            sums.add(row)
        self.sentence = sums.means("sentence")
        self._early = None
