"""Attention heads against their own healthy past: moments per signal, layer and head.

A head's signals depend on where in the answer a token stands, so the first tokens have moments of their
own. What healthy answers vary in together (their leading directions) is taken out before the rest is
measured: a fault moves heads in ways in which health does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from alerting.scores.rows import Floats, LayerRow
from engine.messages import HEAD_SIGNALS

STAGES = 4  # tokens 0, 1, 2–3, and all later ones
_CLIP = 6.0  # of a token's z, so that one head of one token decides nothing
_MEAN_CLIP = 8.0
_SD_FLOOR = 4e-3  # finer differences drown in float16
_SPREAD_FLOOR = 0.05  # of a response's mean z
_FEWEST = 8  # values behind a moment
_RIDGE = 0.5
DIRECTIONS = 32


def stage(step: int) -> int:
    """Return which moments a token is measured by."""
    return (0, 1, 2, 2)[step] if step < 4 else 3


class HeadModel:
    """Healthy heads, frozen. All arrays are [..., HEAD_SIGNALS, layers, heads], never written.

    `mean`, `sd` [STAGES, ...] are of a token's signals; sd 0 where too little was seen. `spread` is the
    variance of a response's mean z that more tokens do not remove; `directions` [k, ...] are orthonormal.
    """

    def __init__(
        self, mean: NDArray[np.float32], sd: NDArray[np.float32], spread: Floats, directions: Floats
    ) -> None:
        self.mean, self.sd, self.spread, self.directions = mean, sd, spread, directions
        self._flat = directions.reshape(len(directions), spread.size)
        with np.errstate(divide="ignore"):
            self._scale = np.where(sd > 0, 1 / sd, np.nan).astype(np.float32)

    @property
    def shape(self) -> tuple[int, ...]:
        """[HEAD_SIGNALS, layers, heads]."""
        return self.spread.shape

    def z(self, row: LayerRow) -> Floats:
        """Return the clipped z-scores of one token [HEAD_SIGNALS, its layers, heads]; NaN is absent.

        Raises ValueError when the row has layers or heads that this model has not.
        """
        layers = list(row.layers)
        if row.heads.shape[-1] != self.shape[2] or (layers and max(layers) >= self.shape[1]):
            raise ValueError("the baseline's heads are of another model; run `quaver calibrate` again")
        at = stage(row.step)
        z = (row.heads - self.mean[at][:, layers]) * self._scale[at][:, layers]
        return np.asarray(np.clip(z, -_CLIP, _CLIP), dtype=np.float64)

    def standardise(self, sums: Floats, counts: Floats) -> Floats:
        """Return a response's mean z in units of what healthy ones of as many tokens vary by; NaN: none."""
        with np.errstate(divide="ignore", invalid="ignore"):
            unit = np.sqrt(self.spread + (1 - self.spread) / counts)
            return np.clip(np.where(counts > 0, sums / counts / unit, np.nan), -_MEAN_CLIP, _MEAN_CLIP)

    def residual(self, z: Floats) -> Floats:
        """Take out of standardised z [shape] what health varies in; NaN stays."""
        flat = z.ravel()
        there = np.isfinite(flat)
        if not len(self._flat) or there.sum() < 2 * len(self._flat):
            return z
        basis, seen = self._flat[:, there], flat[there]
        ridge = 0.0 if there.all() else _RIDGE
        weights = np.linalg.solve(basis @ basis.T + ridge * np.eye(len(basis)), basis @ seen)
        result = flat.copy()
        result[there] = seen - weights @ basis
        return result.reshape(z.shape)


class HeadSums:
    """A response's heads while it streams. The first token, which the prompt made, stays out."""

    __slots__ = ("_model", "counts", "rises", "sums")

    def __init__(self, model: HeadModel) -> None:
        self._model = model
        self.sums = np.zeros(model.shape)
        self.counts = np.zeros(model.shape)
        self.rises: list[float] = []  # root mean square z of every token with detail

    def add(self, row: LayerRow) -> None:
        """Take the detail of one token in."""
        if row.step < 1:
            return
        z = self._model.z(row)
        there = np.isfinite(z)
        z[~there] = 0.0
        layers = list(row.layers)
        self.sums[:, layers] += z
        self.counts[:, layers] += there
        seen = np.count_nonzero(there)
        if seen:
            self.rises.append(float(np.sqrt(np.vdot(z, z) / seen)))

    def standardised(self) -> Floats | None:
        """Return the response's standardised z [HEAD_SIGNALS, layers, heads]; None without detail."""
        return self._model.standardise(self.sums, self.counts) if self.rises else None


def fit_heads(responses: Sequence[Iterable[LayerRow]]) -> HeadModel | None:
    """Return the model of healthy responses' layer rows; None when there are too few."""
    rows = [list(response) for response in responses]
    rows = [response for response in rows if any(row.step for row in response)]
    if len(rows) < _FEWEST:
        return None
    depth = 1 + max(layer for response in rows for row in response for layer in row.layers)
    shape = (len(HEAD_SIGNALS), depth, rows[0][0].heads.shape[-1])
    mean, sd = _moments((row for response in rows for row in response), shape)
    plain = HeadModel(mean, sd, np.zeros(shape), np.empty((0, *shape)))
    found = [_sums(plain, response) for response in rows]
    means = np.stack([np.where(s.counts > 0, s.sums / np.maximum(s.counts, 1), np.nan) for s in found])
    counts = np.stack([s.counts for s in found])
    there = np.isfinite(means)
    seen = np.maximum(there.sum(0), 1)
    # Tokens of a response are alike: their mean varies by `spread`, and by the rest ÷ their number.
    usual = np.maximum(counts.sum(0) / seen, 1.0)
    variance = (np.where(there, means, 0.0) ** 2).sum(0) / seen
    with np.errstate(divide="ignore", invalid="ignore"):
        spread = np.where(usual > 1, (variance - 1 / usual) / (1 - 1 / usual), variance)
    spread = np.clip(np.nan_to_num(spread), _SPREAD_FLOOR**2, 1.0)
    half = HeadModel(mean, sd, spread, np.empty((0, *shape)))
    z = np.stack([half.standardise(s.sums, s.counts) for s in found]).reshape(len(found), -1)
    return HeadModel(mean, sd, spread, _leading(np.nan_to_num(z)).reshape(-1, *shape))


def _sums(model: HeadModel, rows: Iterable[LayerRow]) -> HeadSums:
    sums = HeadSums(model)
    for row in rows:
        sums.add(row)
    return sums


def _moments(
    rows: Iterable[LayerRow], shape: tuple[int, ...]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    total, square, count = (np.zeros((STAGES, *shape)) for _ in range(3))
    for row in rows:
        layers, values = list(row.layers), np.asarray(row.heads, dtype=np.float64)
        there = np.isfinite(values)
        values = np.where(there, values, 0.0)
        at = stage(row.step)
        total[at][:, layers] += values
        square[at][:, layers] += values**2
        count[at][:, layers] += there
    mean = total / np.maximum(count, 1)
    sd = np.sqrt(np.maximum(square / np.maximum(count, 1) - mean**2, 0.0)) + _SD_FLOOR
    return mean.astype(np.float32), np.where(count >= _FEWEST, sd, 0.0).astype(np.float32)


def _leading(z: Floats) -> Floats:
    """Return the orthonormal leading directions [k, features] of standardised responses [n, features]."""
    most = min(DIRECTIONS, len(z) // 4)
    _, _, directions = np.linalg.svd(z - z.mean(0), full_matrices=False)
    return np.asarray(directions[:most])
