"""Two baselines side by side: which statistics of healthy responses moved, and by how much."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from alerting.baseline import Baseline, Stratum

ALPHA = 0.001  # a statistic whose two samples are this unlikely to be of one distribution has moved


class Moved(msgspec.Struct, frozen=True):
    """One statistic of one stratum. Medians in its own unit; `distance` is Kolmogorov–Smirnov's, 0 … 1."""

    route: str
    band: str
    statistic: str
    before: float
    after: float
    distance: float
    moved: bool


class Comparison(msgspec.Struct, frozen=True):
    """`notes` say what is not comparable; strata are named `route/band`."""

    notes: list[str]
    gone: list[str]
    new: list[str]
    statistics: list[Moved]


def compare(before: Baseline, after: Baseline) -> Comparison:
    """Compare every statistic that both baselines hold for a stratum."""
    notes = [
        f"{what}: {one} before, {other} after"
        for what, one, other in (
            ("model", before.model, after.model),
            ("quantisation", before.quantization, after.quantization),
            ("rules", before.rules, after.rules),
        )
        if one != other
    ]
    old, new = ({f"{s.route}/{s.band}": s for s in b.strata} for b in (before, after))
    found = [moved for name in old if name in new for moved in _strata(old[name], new[name])]
    return Comparison(notes, sorted(old.keys() - new.keys()), sorted(new.keys() - old.keys()), found)


def distance(one: Sequence[float], other: Sequence[float]) -> tuple[float, bool]:
    """Return the Kolmogorov–Smirnov distance of two samples, and whether it is significant at `ALPHA`."""
    a, b = np.sort(one), np.sort(other)
    places = np.concatenate([a, b])
    gap = np.abs(np.searchsorted(a, places, "right") / len(a) - np.searchsorted(b, places, "right") / len(b))
    largest = float(gap.max())
    limit = math.sqrt(-math.log(ALPHA / 2) / 2 * (1 / len(a) + 1 / len(b)))
    return largest, largest > limit


def _strata(before: Stratum, after: Stratum) -> list[Moved]:
    result = []
    for preset in sorted(before.limits.keys() & after.limits.keys()):
        old, new = before.limits[preset].tails, after.limits[preset].tails
        for key in sorted(old.keys() & new.keys()):
            sign = -1.0 if key.endswith(":low") else 1.0
            gap, moved = distance(old[key].values, new[key].values)
            medians = [sign * float(np.median(tails[key].values)) for tails in (old, new)]
            result.append(Moved(before.route, before.band, key, medians[0], medians[1], gap, moved))
    return result
