"""Every score: what it needs, and what it may be compared as."""

from __future__ import annotations

from typing import Literal

import msgspec

Need = Literal["tokens", "post", "heads", "frozen"]
Kind = Literal["plain", "passive", "tap"]

SIGNALS = ("kl", "kl_nonsink", "sink", "previous", "lookback")  # of heads, ordered as HEAD_SIGNALS


class Score(msgspec.Struct, frozen=True):
    """`needs` log-probabilities (tokens), those after all modifiers too (post), layer detail, a baseline.

    `plain` scores are what others use too, for comparison; `tap` ones look behind the modifiers.
    """

    kind: Kind
    needs: frozenset[Need]


def _score(kind: Kind, *needs: Need) -> Score:
    return Score(kind, frozenset(needs))


_MEANS = ("doubt", "surprisal", "entropy")

SCORES: dict[str, Score] = {
    "length": _score("plain", "tokens"),
    **{f"response_{name}": _score("plain", "tokens") for name in _MEANS},
    **{f"sentence_{name}": _score("passive", "tokens") for name in _MEANS},
    **{f"{part}_{name}": _score("passive", "tokens")
       for part in ("response", "sentence") for name in ("excess", "closeness")},
    "window_excess": _score("passive", "tokens"),
    "window_entropy": _score("passive", "tokens"),
    "peak_surprisal": _score("passive", "tokens"),
    "tap_shift": _score("tap", "tokens", "post"),
    "tap_freeze": _score("tap", "tokens", "post"),
    "cusum": _score("passive", "tokens", "frozen"),
    "entropy_shift": _score("passive", "tokens", "frozen"),
    "rauq": _score("plain", "tokens", "heads", "frozen"),
    "sentence_rauq": _score("passive", "tokens", "heads", "frozen"),
    **{f"heads_{name}": _score("passive", "heads", "frozen") for name in SIGNALS},
    "heads": _score("passive", "heads", "frozen"),
    "heads_residual": _score("passive", "heads", "frozen"),
    "heads_onset": _score("passive", "heads", "frozen"),
    "contrast": _score("passive", "heads", "frozen"),
    "combined": _score("passive", "tokens", "frozen"),
    "combined_tap": _score("tap", "tokens", "post", "frozen"),
}  # fmt: skip
