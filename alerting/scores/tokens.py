"""Scores of log-probabilities alone: every engine that gives them has these. Larger is more suspicious."""

from __future__ import annotations

import numpy as np

from alerting.scores.onset import highest_mean
from alerting.scores.rows import (
    CONFIDENCE,
    ENTROPY,
    ENTROPY_POST,
    MARGIN,
    SURPRISAL,
    SURPRISAL_POST,
    Floats,
)

WINDOW = 3  # tokens of a short window


def token_scores(tokens: Floats, sentence: int) -> dict[str, float]:
    """Score tokens [T, TOKEN_SIGNALS], T > 0, of which the first `sentence` are the first sentence."""
    scores = {"length": float(len(tokens))}
    excess = tokens[:, SURPRISAL] - tokens[:, ENTROPY]
    for prefix, part, over in (
        ("response", tokens, excess),
        ("sentence", tokens[:sentence], excess[:sentence]),
    ):
        scores[f"{prefix}_doubt"] = 1.0 - float(part[:, CONFIDENCE].mean())
        scores[f"{prefix}_surprisal"] = float(part[:, SURPRISAL].mean())
        scores[f"{prefix}_entropy"] = float(part[:, ENTROPY].mean())
        scores[f"{prefix}_excess"] = float(over.mean())
        margins = part[:, MARGIN]
        if np.isfinite(margins).any():
            scores[f"{prefix}_closeness"] = 1.0 - float(np.nanmean(margins))
    scores["window_excess"] = highest_mean(excess, WINDOW)
    scores["window_entropy"] = highest_mean(tokens[:, ENTROPY], WINDOW)
    scores["peak_surprisal"] = float(tokens[:, SURPRISAL].max())
    return scores | tap_scores(tokens)


def tap_scores(tokens: Floats) -> dict[str, float]:
    """Compare the logits before and after everything that changes them; nothing without the post-tap.

    `tap_shift` is how far entropy and surprisal of a token move, in nats; `tap_freeze` how much the entropy
    falls: gross noise makes the sampler sure of nonsense.
    """
    both = tokens[np.isfinite(tokens[:, [SURPRISAL_POST, ENTROPY_POST]]).all(1)]
    if not len(both):
        return {}
    moved = both[:, [SURPRISAL_POST, ENTROPY_POST]] - both[:, [SURPRISAL, ENTROPY]]
    return {
        "tap_shift": float(np.abs(moved).sum(1).mean()),
        "tap_freeze": float(-moved[:, 1].mean()),
    }
