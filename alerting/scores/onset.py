"""Statistics that a change in the middle of a response cannot hide in the mean of."""

from __future__ import annotations

import numpy as np

from alerting.scores.rows import Floats


def highest_mean(values: Floats, width: int) -> float:
    """Return the highest mean of `width` values in a row; of all where there are fewer, 0 of none."""
    if len(values) <= width:
        return float(values.mean()) if len(values) else 0.0
    sums = np.concatenate([[0.0], np.cumsum(values)])
    return float((sums[width:] - sums[:-width]).max() / width)


def highest_cusum(values: Floats, allowance: float) -> float:
    """Return the maximum of W ← max(0, W + value − allowance) over the values, from W = 0 (Page, 1954)."""
    walk = np.concatenate([[0.0], np.cumsum(values - allowance)])
    return float((walk - np.minimum.accumulate(walk)).max())
