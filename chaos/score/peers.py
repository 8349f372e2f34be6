"""Scores that others use, of the card's own answers: EPR, and lm-polygraph's estimators by that library."""

from __future__ import annotations

import importlib
import importlib.metadata
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Alternatives of a token that EPR looks at.
EPR_TOP = 15
LIBRARY = "lm-polygraph"


def epr(logprobs: Sequence[Sequence[float]]) -> float:
    """Return the entropy production rate in nats a token: the mean over tokens of Σ −p ln p of the most
    likely ones. `logprobs` [tokens > 0][up to EPR_TOP]."""
    tokens = [np.asarray(token[:EPR_TOP], float) for token in logprobs]
    return float(np.mean([-(np.exp(token) * token).sum() for token in tokens]))


def version() -> str | None:
    """Return the version of lm-polygraph; None when it is not installed."""
    try:
        return importlib.metadata.version(LIBRARY)
    except importlib.metadata.PackageNotFoundError:
        return None


class Polygraph:
    """The estimators of lm-polygraph that want one pass and no other model; importing it takes seconds.

    Left out are those that draw several answers, ask the model again, or bring a model of their own.
    """

    def __init__(self, layers: int, heads: int) -> None:
        """Raises ImportError without the library."""
        estimators: Any = importlib.import_module("lm_polygraph.estimators")
        calculators: Any = importlib.import_module("lm_polygraph.stat_calculators.entropy")
        self._entropy = calculators.EntropyCalculator()
        self._estimators = [
            estimators.MaximumSequenceProbability(),
            estimators.Perplexity(),
            estimators.MeanTokenEntropy(),
            estimators.SelfCertainty(),
            estimators.RenyiNeg(),
            estimators.FisherRao(),
            estimators.BoostedProbSequence(),
            estimators.RAUQ(n_layers=layers, n_heads=heads, instruct=True),
        ]

    def scores(
        self, token_ids: Sequence[int], log_probs: NDArray[np.float32], previous: NDArray[Any]
    ) -> dict[str, float]:
        """Score one answer of T > 0 tokens; larger is more suspicious. What is not finite is left out.

        `log_probs` [T, vocabulary] are of the raw distributions, `previous` [T, layers, heads] the attention
        of the position that predicts a token on the position before it.
        """
        count = len(token_ids)
        attention = np.zeros((previous[0].size, count, count))
        rows = np.arange(1, count)
        attention[:, rows, rows - 1] = previous.reshape(count, -1).T[:, 1:]
        stats: dict[str, Any] = {
            "greedy_tokens": [list(token_ids)],
            "greedy_log_probs": [log_probs],
            "greedy_log_likelihoods": [log_probs[np.arange(count), token_ids]],
            "attention_all": [attention],
        }
        stats |= self._entropy(stats)
        with warnings.catch_warnings():  # RAUQ, of an answer of one token
            warnings.simplefilter("ignore", RuntimeWarning)
            found = {f"{LIBRARY}: {estimator}": float(estimator(stats)[0]) for estimator in self._estimators}
        return {name: value for name, value in found.items() if np.isfinite(value)}
