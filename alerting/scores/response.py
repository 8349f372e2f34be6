"""All scores of one response, streaming or whole. Larger is more suspicious, for every one of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from alerting.scores.catalogue import SIGNALS
from alerting.scores.contrast import log_odds
from alerting.scores.frozen import Frozen
from alerting.scores.heads import HeadSums
from alerting.scores.onset import highest_cusum, highest_mean
from alerting.scores.rauq import attention_of, rauq
from alerting.scores.rows import CONFIDENCE, SURPRISAL, Floats, LayerRow, token_array, usable
from alerting.scores.tokens import WINDOW, token_scores

ALLOWANCE = 0.5  # nats a token may be more surprising than a healthy one before the CUSUM climbs
SENTENCE_TOKENS = 16  # stand for the first sentence where none ends before
COMBINED = ("sentence_entropy", "window_excess", "heads_residual", "contrast")
_HIGH, _TAP_HIGH = 6.0, 12.0  # standard deviations, so that no score outweighs all others
#: Least standard deviation of scores that do not vary at all in most healthy traffic.
FLOORS = {"tap_shift": 0.05, "tap_freeze": 0.05}


class HeadRows:
    """The layer detail of a response while it streams."""

    __slots__ = ("_frozen", "_sums")

    def __init__(self, frozen: Frozen) -> None:
        self._frozen = frozen
        self._sums: HeadSums | None = None  # takes memory once there is detail

    def add(self, row: LayerRow) -> None:
        """Take the detail of one token in; raises ValueError when it is of another model."""
        if self._sums is None:
            if self._frozen.head_model is None:
                return
            self._sums = HeadSums(self._frozen.head_model)
        self._sums.add(row)

    def scores(self) -> dict[str, float]:
        """Return the scores of heads; none without detail."""
        z = None if self._sums is None else self._sums.standardised()
        if z is None or self._sums is None or self._frozen.head_model is None:
            return {}
        rest = self._frozen.head_model.residual(z)
        found = {f"heads_{name}": _size(part) for name, part in zip(SIGNALS, rest, strict=True)}
        found = {name: size for name, size in found.items() if size > 0}
        found |= {"heads": _size(z), "heads_residual": _size(rest)}
        found["heads_onset"] = highest_mean(np.array(self._sums.rises), WINDOW)
        if self._frozen.contrast is not None:
            found["contrast"] = log_odds(self._frozen.contrast, z)
        return found


def response_scores(
    tokens: Any,
    layers: Iterable[LayerRow | None] | None = (),
    sentence_tokens: int | None = None,
    frozen: Frozen | None = None,
) -> dict[str, float]:
    """Score one response; names are those of `SCORES`, and only those whose needs are met are there.

    `tokens` [T, TOKEN_SIGNALS], `layers` rows of any of its tokens, however sparse, `sentence_tokens` the
    length of its first sentence. Nothing usable gives no score. Raises ValueError for shapes that do not fit.
    """
    usable_tokens, steps = token_array(tokens)
    if not len(usable_tokens):
        return {}
    sentence = max(1, min(sentence_tokens or SENTENCE_TOKENS, SENTENCE_TOKENS, len(usable_tokens)))
    found = token_scores(usable_tokens, sentence)
    if frozen is None:
        return found
    found["cusum"] = highest_cusum(usable_tokens[:, SURPRISAL] - frozen.surprisal, ALLOWANCE)
    if "sentence_entropy" in frozen.usual:
        found["entropy_shift"] = abs(frozen.standardise("sentence_entropy", found["sentence_entropy"]))
    rows = usable(layers)
    if rows and frozen.heads is not None:
        detail, picked = HeadRows(frozen), frozen.heads.rauq
        for row in rows:
            detail.add(row)
        attention = {row.step: attention_of(picked, row) for row in rows}
        known = [attention.get(step) for step in steps.tolist()]
        confidence = usable_tokens[:, CONFIDENCE]
        found["rauq"] = rauq(picked, confidence, known)
        found["sentence_rauq"] = rauq(picked, confidence[:sentence], known[:sentence])
        found |= detail.scores()
    return found | combined(found, frozen)


def combined(found: Mapping[str, float], frozen: Frozen) -> dict[str, float]:
    """Sum, in standard deviations, how far scores lie above their healthy means; absent ones lie there."""
    if not frozen.usual:
        return {}
    total = _sum(found, COMBINED, frozen, _HIGH)
    result = {"combined": total}
    if "tap_shift" in found:
        result["combined_tap"] = total + _sum(found, ("tap_shift",), frozen, _TAP_HIGH)
    return result


def _sum(found: Mapping[str, float], names: Sequence[str], frozen: Frozen, high: float) -> float:
    known = (frozen.standardise(name, found[name]) for name in names if name in found)
    return sum(min(max(z, 0.0), high) for z in known)


def _size(z: Floats) -> float:
    """Return the root mean square of what is there, 0 of nothing."""
    there = z[np.isfinite(z)]
    return float(np.sqrt((there**2).mean())) if len(there) else 0.0
