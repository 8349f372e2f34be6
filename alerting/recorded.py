"""One recorded response as causes are looked for in it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from alerting.baseline import Baseline
from alerting.causes import Causes, Detail, Found, explain
from alerting.scores import recorded, response_scores
from alerting.statistics import BANDS, temperature_band
from engine.messages import TOKEN_SIGNALS
from telemetry import query


def explain_recorded(folder: Path, request_id: str, baseline: Baseline, causes: Causes) -> list[Found]:
    """Return the causes that hold for choice 0 of a recorded request, the likeliest first.

    Raises LookupError when nothing is recorded of it, when it lost tokens, or when the baseline knows no
    answers at its temperature.
    """
    requests, tokens, layers = (
        query.select(folder, f"SELECT * FROM {table} WHERE request_id = $1 {rest}", [request_id])  # noqa: S608
        for table, rest in (
            ("requests", ""),
            ("tokens", "AND choice = 0 ORDER BY step"),
            ("layers", "AND choice = 0 ORDER BY step"),
        )
    )
    if not requests or not tokens:
        raise LookupError(f"nothing is recorded of {request_id}")
    aggregates = requests[0]["aggregates"] or {}
    if "lost_tokens" in aggregates:
        raise LookupError(
            f"telemetry lost {aggregates['lost_tokens']:.0f} tokens of {request_id}: the rest says too little"
        )
    if "lost_layers" in aggregates:
        layers = []
    band = temperature_band(requests[0]["temperature"] or 0.0)
    frozen = baseline.frozen.get(band)
    if frozen is None:
        raise LookupError(
            f"the baseline knows no healthy answers of the temperature band {band!r}, {BANDS[band]}"
        )
    rows = [(row, found) for row in layers if (found := recorded(row)) is not None]
    depth = frozen.head_model.shape[1] if frozen.head_model is not None else 1
    details = [
        Detail(
            step=found.step,
            layers=list(found.layers),
            of=depth,
            lens=np.array(row["lens_entropy"] or [np.nan] * len(found.layers), dtype=np.float64),
            heads=found.heads,
        )
        for row, found in rows
    ]
    sentence = aggregates.get("sentence_tokens")
    signals = [[token[name] for name in TOKEN_SIGNALS] for token in tokens]
    scores = response_scores(
        signals, [found for _, found in rows], None if sentence is None else int(sentence), frozen
    )
    return explain(causes, scores, frozen, signals, details)
