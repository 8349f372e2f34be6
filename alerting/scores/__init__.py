"""Scores of responses: pure functions over token rows and layer rows, for the evaluator and offline alike."""

from alerting.scores.catalogue import SCORES, Score
from alerting.scores.fit import FitError, fit, folds
from alerting.scores.frozen import Frozen
from alerting.scores.response import response_scores
from alerting.scores.rows import LayerRow, Response, layer_row, recorded, rows_of

__all__ = [
    "SCORES",
    "FitError",
    "Frozen",
    "LayerRow",
    "Response",
    "Score",
    "fit",
    "folds",
    "layer_row",
    "recorded",
    "response_scores",
    "rows_of",
]
