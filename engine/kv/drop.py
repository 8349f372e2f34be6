"""Which of a prompt's tokens stay when its pages go down: those that its last tokens attend to.

The model says what the last queries of a prompt attend to (`Output.mass`). What is decided lies with the
pages in the prefix cache until they are packed; a page that nobody has judged loses nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.models.step import Floats

SINKS = 4  # first tokens that are never dropped: heads with nothing to look at look there
_FEW = 8  # queries that know too little


@dataclass(frozen=True)
class Judgement:
    """Which tokens of a prompt stay (bool [tokens]), and the entropy of what its last tokens attend to."""

    keep: NDArray[np.bool_]
    entropy: float


@dataclass(frozen=True)
class DropPolicy:
    """Drops at most `most` of a prompt's tokens, 0 … 1: the longer and the more concentrated, the more.

    Prompts of `short` tokens lose nothing, those of `long` all they may; so do those whose attention has
    an entropy of `spread`, and of `close`. In between the share grows with the logarithm of the length, and
    evenly with the entropy. The last `window` tokens of a prompt are the ones that are asked, and stay.
    A token counts as much as the best of it and `around` neighbours on each side: what a fact is made of
    stays together.
    """

    most: float
    window: int = 64
    around: int = 7
    short: int = 256
    long: int = 2048
    spread: float = 0.8
    close: float = 0.6

    def share(self, tokens: int, entropy: float) -> float:
        """Return the share that is dropped of `tokens` with an `entropy` of 0 … 1."""
        length = math.log(max(tokens, 1) / self.short) / math.log(self.long / self.short)
        closeness = (self.spread - entropy) / (self.spread - self.close)
        return self.most * _bounded(length) * _bounded(closeness)

    def judge(self, mass: Floats) -> Judgement | None:
        """Judge a prompt's tokens by the `mass` [tokens] that its last queries gave them, added up.

        None where too few queries have been asked. Those that stay are the ones with the most mass of the
        whole prompt, not of each block, and the first and last ones.
        """
        queries = float(mass.sum())
        if queries < _FEW:
            return None
        entropy = entropy_of(mass / queries)
        near = np.lib.stride_tricks.sliding_window_view(np.pad(mass, self.around), 2 * self.around + 1)
        scores = near.max(1)
        scores[:SINKS] = scores[-self.window :] = np.inf
        count = min(
            round(self.share(len(mass), entropy) * len(mass)), max(len(mass) - SINKS - self.window, 0)
        )
        keep = np.ones(len(mass), np.bool_)
        keep[np.argpartition(scores, count)[:count]] = False
        return Judgement(keep, entropy)


def entropy_of(shares: Floats) -> float:
    """Entropy of shares that add up to 1, ÷ that of as many equal ones: 0 (one has all) … 1."""
    there = shares[shares > 0]
    return float(-(there * np.log(there)).sum()) / math.log(max(len(shares), 2))


def _bounded(share: float) -> float:
    return min(max(share, 0.0), 1.0)
