"""RAUQ (Vazhentsev et al., 2025): confidence carried along by the head that looks at the token before.

c₁ = p₁, cᵢ = α pᵢ + (1 − α) aᵢ cᵢ₋₁ for one head a layer; the score is the largest mean −ln c of the middle
layers. The paper picks the heads with the whole response before it; here they are frozen on healthy
responses, so that it streams.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from alerting.scores.rows import Floats, LayerRow
from engine.messages import HEAD_SIGNALS

ALPHA = 0.5
_PREVIOUS = HEAD_SIGNALS.index("prev_attention")
_LEAST = 1e-9


class RauqHeads(msgspec.Struct, frozen=True):
    """For every middle layer, from `first` on: its head, and that head's healthy mean attention."""

    first: int
    heads: list[int]
    attention: list[float]


def fit_rauq(responses: Iterable[Iterable[LayerRow]], shape: Sequence[int]) -> RauqHeads:
    """Pick the heads with the highest healthy attention to the token before; `shape` is the head model's."""
    total, count = np.zeros(shape[1:]), np.zeros(shape[1:])
    for response in responses:
        for row in response:
            values = np.asarray(row.heads[_PREVIOUS], dtype=np.float64)
            total[list(row.layers)] += np.nan_to_num(values)
            count[list(row.layers)] += np.isfinite(values)
    first, end = len(total) // 3, max(len(total) // 3 + 1, 2 * len(total) // 3)
    mean = (total / np.maximum(count, 1))[first:end]
    heads = mean.argmax(1)
    return RauqHeads(first, heads.tolist(), mean[np.arange(len(heads)), heads].tolist())


def attention_of(heads: RauqHeads, row: LayerRow) -> Floats:
    """Return a token's attention to the one before [middle layers]; the healthy mean where it is absent."""
    found = np.array(heads.attention)
    for place, layer in enumerate(row.layers):
        at = layer - heads.first
        if 0 <= at < len(found) and np.isfinite(row.heads[_PREVIOUS, place, heads.heads[at]]):
            found[at] = row.heads[_PREVIOUS, place, heads.heads[at]]
    return found


def rauq(heads: RauqHeads, confidence: Floats, attention: Sequence[Floats | None]) -> float:
    """Score the tokens' confidences [T], T > 0; `attention` [T] holds `attention_of`, None where unknown."""
    usual = np.array(heads.attention)
    carried = np.full(len(usual), confidence[0])
    doubt = -np.log(np.maximum(carried, _LEAST))
    for p, known in zip(confidence[1:], attention[1:], strict=True):
        carried = ALPHA * p + (1 - ALPHA) * (usual if known is None else known) * carried
        doubt -= np.log(np.maximum(carried, _LEAST))
    return float((doubt / len(confidence)).max())
