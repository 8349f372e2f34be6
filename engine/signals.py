"""Per-response aggregates and the choice of which tokens get layer detail.

Aggregates are fixed in size, computed in the step and never dropped; detail may be sampled.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from engine.messages import HEAD_SIGNALS, TOKEN_SIGNALS
from engine.models.step import Floats, Ints, Output

#: Below this probability a token counts as low, as in the `raw` alert preset.
LOW_CONFIDENCE = 0.65

_CONFIDENCE = TOKEN_SIGNALS.index("confidence")
_ENTROPY = TOKEN_SIGNALS.index("entropy")
_SURPRISAL = TOKEN_SIGNALS.index("surprisal")
_SURPRISAL_POST = TOKEN_SIGNALS.index("surprisal_post")


def token_signals(output: Output, tokens: Ints) -> Floats:
    """TOKEN_SIGNALS [R, 7] of the rows' emitted tokens, the last two as if nothing modified the logits.

    A token that is not its row's most likely one must be among the row's `ids` or have kept logits.
    """
    chosen = output.values[:, 0].copy()
    rank = np.ones(len(tokens), np.float32)
    logits = dict(zip(output.kept, output.logits, strict=True))
    for i in np.flatnonzero(tokens != output.ids[:, 0]):
        place = np.flatnonzero(output.ids[i] == tokens[i])
        chosen[i] = output.values[i, place[0]] if len(place) else float(logits[i][tokens[i]])
        rank[i] = place[0] if len(place) else int((logits[i] > chosen[i]).sum())
        rank[i] += 1
    surprisal = output.lse - chosen
    first, second = np.exp(output.values[:, :2] - output.lse[:, None]).T
    columns = (surprisal, np.exp(-surprisal), first - second, rank, output.entropy, surprisal, output.entropy)
    return np.stack(columns, axis=1)


@dataclass(slots=True)
class Aggregates:
    """Running facts of one choice's tokens."""

    tokens: int = 0
    sums: np.ndarray = field(default_factory=lambda: np.zeros(len(TOKEN_SIGNALS)))
    min_confidence: float = math.inf
    max_entropy: float = -math.inf
    low_tokens: int = 0
    low_run: int = 0
    longest_low_run: int = 0
    detail_tokens: int = 0
    head_sums: np.ndarray = field(default_factory=lambda: np.zeros(len(HEAD_SIGNALS)))
    head_counts: np.ndarray = field(default_factory=lambda: np.zeros(len(HEAD_SIGNALS)))

    def add(self, signals: np.ndarray) -> None:
        """Take one token's row, ordered as TOKEN_SIGNALS."""
        self.tokens += 1
        self.sums += signals
        self.min_confidence = min(self.min_confidence, float(signals[_CONFIDENCE]))
        self.max_entropy = max(self.max_entropy, float(signals[_ENTROPY]))
        low = signals[_CONFIDENCE] < LOW_CONFIDENCE
        self.low_tokens += int(low)
        self.low_run = self.low_run + 1 if low else 0
        self.longest_low_run = max(self.longest_low_run, self.low_run)

    def add_heads(self, heads: np.ndarray) -> None:
        """Take one token's head detail [signals, layers, heads]; NaN is absent."""
        self.detail_tokens += 1
        there = ~np.isnan(heads)
        self.head_sums += np.where(there, heads, 0).sum((1, 2))
        self.head_counts += there.sum((1, 2))

    def as_dict(self) -> dict[str, float]:
        """Return named figures; means over tokens, nats. Empty when nothing was emitted."""
        if not self.tokens:
            return {}
        means = dict(zip((f"mean_{name}" for name in TOKEN_SIGNALS), self.sums / self.tokens, strict=True))
        excess = self.sums[_SURPRISAL] - self.sums[_ENTROPY]
        shift = self.sums[_SURPRISAL_POST] - self.sums[_SURPRISAL]
        figures = {
            **means,
            "mean_excess": excess / self.tokens,  # surprisal − entropy, near 0 when sampling is honest
            "mean_post_shift": shift / self.tokens,
            "min_confidence": self.min_confidence,
            "max_entropy": self.max_entropy,
            "low_tokens": self.low_tokens,
            "longest_low_run": self.longest_low_run,
            "tokens": self.tokens,
            "detail_tokens": self.detail_tokens,
        }
        for name, total, count in zip(HEAD_SIGNALS, self.head_sums, self.head_counts, strict=True):
            if count:
                figures[f"mean_{name}"] = total / count
        return {name: float(value) for name, value in figures.items()}


def sampled_layers(layers: int, every: int) -> list[int]:
    """Layers that get detail: every `every`-th from 0, and always the last; none for 0."""
    if every == 0:
        return []
    return sorted({*range(0, layers, every), layers - 1})


def wants_detail(step: int, every: int, full: bool) -> bool:
    """Whether a response's `step`-th token gets layer detail."""
    return full or step % every == 0
