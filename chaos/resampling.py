"""Intervals by resampling whole clusters: families of prompts, whose answers have much in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

_DRAWS = 1000


def clustered(
    figure: Callable[[NDArray[np.intp]], float], clusters: Sequence[str], seed: int = 0
) -> tuple[float, float]:
    """Return the middle 95 % of a figure of rows, drawn with whole clusters.

    `figure` takes indices of rows; rows of one cluster (`clusters` [rows]) stay together, so that what they
    have in common does not make the interval look narrower than it is.
    """
    found = np.asarray(clusters)
    members = [np.flatnonzero(found == name) for name in np.unique(found)]
    drawn = np.random.default_rng(seed).integers(0, len(members), (_DRAWS, len(members)))
    values = [figure(np.concatenate([members[i] for i in draw])) for draw in drawn]
    low, high = np.quantile(values, (0.025, 0.975))
    return float(low), float(high)
