"""A logistic regression on heads that tells answers with their passage from answers without it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from alerting.scores.rows import Floats

_CLIP = 5.0
_UNIT = 4.0
_STRENGTH = 30.0  # of the ridge
_STEPS = 60


def inputs(z: Floats) -> Floats:
    """Return the inputs [n, features] of standardised heads [n, ...]; absent is 0."""
    flat = z.reshape(len(z), -1)
    return np.clip(np.nan_to_num(flat), -_CLIP, _CLIP) / _UNIT


def fit_logistic(z: Floats, bad: Sequence[bool]) -> Floats:
    """Return weights [1 + features] of a ridge logistic regression, the intercept first.

    Both classes count alike, however many there are. Solved in the span of the samples, by Newton's method.
    """
    x, y = inputs(z), np.asarray(bad, dtype=np.float64)
    if not 0 < y.mean() < 1:
        raise ValueError("a contrast needs answers of both kinds, with the passage and without")
    weight = np.where(y > 0, 0.5 / y.mean(), 0.5 / (1 - y.mean()))
    gram = x @ x.T
    dual, intercept = np.zeros(len(y)), 0.0
    for _ in range(_STEPS):
        p = 1 / (1 + np.exp(-np.clip(gram @ dual + intercept, -30, 30)))
        curve = np.maximum(weight * p * (1 - p), 1e-6)
        target = gram @ dual + intercept + weight * (y - p) / curve
        ones = np.ones((len(y), 1))
        system = np.block([[gram + np.diag(_STRENGTH / curve), ones], [ones.T, np.zeros((1, 1))]])
        solution = np.linalg.solve(system, np.append(target, 0.0))
        moved = float(np.abs(solution[:-1] - dual).max())
        dual, intercept = solution[:-1], float(solution[-1])
        if moved < 1e-8:
            break
    return np.concatenate([[intercept], x.T @ dual])


def log_odds(weights: Floats, z: Floats) -> float:
    """Return the log-odds that a response with standardised heads z lacks its passage."""
    return float(weights[0] + inputs(z[None])[0] @ weights[1:])
