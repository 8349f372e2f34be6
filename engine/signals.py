"""What is kept of a response's tokens while it runs: fixed-size aggregates, and how risky it looks.

Aggregates are computed in the step and never dropped; layer detail is sampled (`engine.budget`).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engine.messages import HEAD_SIGNALS, TOKEN_SIGNALS
from engine.models.step import Floats, Ints, Output

#: Below this probability a token counts as low, as in the `raw` alert preset.
LOW_CONFIDENCE = 0.65
#: The first tokens of a response have nothing before them to be judged by, and set its course.
FIRST_TOKENS = 4

_WIDTH = len(TOKEN_SIGNALS)
_SURPRISAL, _CONFIDENCE, _MARGIN, _RANK, _ENTROPY, _SURPRISAL_POST, _ENTROPY_POST = map(
    TOKEN_SIGNALS.index,
    ("surprisal", "confidence", "margin", "rank", "entropy", "surprisal_post", "entropy_post"),
)


def token_signals(output: Output, tokens: Ints) -> Floats:
    """TOKEN_SIGNALS [R, 7] of the rows' emitted tokens, the last two as if nothing modified the logits.

    A token that is not its row's most likely one must be among the row's `ids` or have kept logits.
    """
    found = np.empty((len(tokens), _WIDTH), np.float32)
    chosen, rank = output.values[:, 0].copy(), found[:, _RANK]
    rank[:] = 1
    for i in np.flatnonzero(tokens != output.ids[:, 0]).tolist():
        place = np.flatnonzero(output.ids[i] == tokens[i])
        if len(place):
            chosen[i], rank[i] = output.values[i, place[0]], place[0] + 1
        else:
            logits = output.logits[output.kept.index(i)]
            chosen[i] = float(logits[tokens[i]])
            rank[i] = int((logits > chosen[i]).sum()) + 1
    first, second = np.exp(output.values[:, :2] - output.lse[:, None]).T
    found[:, _SURPRISAL] = found[:, _SURPRISAL_POST] = surprisal = output.lse - chosen
    found[:, _CONFIDENCE] = np.exp(-surprisal)
    found[:, _MARGIN] = first - second
    found[:, _ENTROPY] = found[:, _ENTROPY_POST] = output.entropy
    return found


class Risk:
    """How risky a response's next token looks, from the statistics of those before it alone."""

    __slots__ = ("_confidence", "_entropy", "_surprisal", "_tokens", "_usual")

    def __init__(self) -> None:
        self._tokens = 0
        self._confidence = self._entropy = self._surprisal = self._usual = 0.0

    def add(self, row: Sequence[float]) -> None:
        """Take in a token's row, ordered as TOKEN_SIGNALS."""
        new = 0.5 if self._tokens else 1.0  # the last two or three tokens count
        self._confidence += new * (row[_CONFIDENCE] - self._confidence)
        self._entropy += new * (row[_ENTROPY] - self._entropy)
        self._surprisal += new * (row[_SURPRISAL] - self._surprisal)
        self._usual += (0.1 if self._tokens else 1.0) * (row[_SURPRISAL] - self._usual)
        self._tokens += 1

    def score(self) -> float:
        """0 … 1: ½ at a confidence of ½, an entropy of 2.5 nats, or a surprisal 1 nat above the usual."""
        if self._tokens < FIRST_TOKENS:
            return 1.0
        rise = (self._surprisal - self._usual) / 2
        found = min(max(1 - self._confidence, self._entropy / 5, rise), 1.0)
        return found if math.isfinite(rise + self._confidence + self._entropy) else 1.0


@dataclass(slots=True)
class Aggregates:
    """Running facts of one choice's tokens."""

    risk: Risk = field(default_factory=Risk)
    tokens: int = 0
    sums: list[float] = field(default_factory=lambda: [0.0] * _WIDTH)
    min_confidence: float = math.inf
    max_entropy: float = -math.inf
    low_tokens: int = 0
    low_run: int = 0
    longest_low_run: int = 0
    detail_tokens: int = 0
    head_sums: NDArray[np.float64] = field(default_factory=lambda: np.zeros(len(HEAD_SIGNALS)))
    head_weights: NDArray[np.float64] = field(default_factory=lambda: np.zeros(len(HEAD_SIGNALS)))

    def add(self, row: Sequence[float]) -> None:
        """Take one token's row, ordered as TOKEN_SIGNALS."""
        self.risk.add(row)
        self.tokens += 1
        self.sums = list(map(operator.add, self.sums, row))
        confidence, entropy = row[_CONFIDENCE], row[_ENTROPY]
        self.min_confidence = min(self.min_confidence, confidence)
        self.max_entropy = max(self.max_entropy, entropy)
        if confidence < LOW_CONFIDENCE:
            self.low_tokens += 1
            self.low_run += 1
            self.longest_low_run = max(self.longest_low_run, self.low_run)
        else:
            self.low_run = 0

    def add_heads(self, sums: NDArray[np.float64], weights: NDArray[np.float64]) -> None:
        """Take one sampled token's head signals: weighted sums and their weights [signals]."""
        self.detail_tokens += 1
        self.head_sums += sums
        self.head_weights += weights

    def as_dict(self) -> dict[str, float]:
        """Return named figures; means over tokens, nats. Empty when nothing was emitted.

        Means of head signals are over what the sampled tokens and layers stand for.
        """
        if not self.tokens:
            return {}
        means = {
            f"mean_{name}": total / self.tokens for name, total in zip(TOKEN_SIGNALS, self.sums, strict=True)
        }
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
        for name, total, weight in zip(HEAD_SIGNALS, self.head_sums, self.head_weights, strict=True):
            if weight:
                figures[f"mean_{name}"] = total / weight
        return {name: float(value) for name, value in figures.items()}


def head_sums(
    heads: NDArray[np.float32], rates: Sequence[float], stride: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Sum head detail [rows, signals, layers, heads] over layers and heads; NaN is absent.

    Each value counts for as many as it stands for: 1 ÷ the rate of its token, times the `stride` of
    its layer (the last layer is always there and stands for itself). Returns the sums and the
    weights they hold, both [rows, signals].
    """
    layers = np.full(heads.shape[2], float(stride))
    layers[-1] = 1.0
    weights = layers[:, None] / np.asarray(rates)[:, None, None, None]
    there = ~np.isnan(heads)
    return (np.where(there, heads, 0) * weights).sum((2, 3)), (there * weights).sum((2, 3))
