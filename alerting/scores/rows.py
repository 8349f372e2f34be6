"""One response as the scores read it: token rows, and layer rows where there are any.

Whatever is absent (None, NaN, an infinity, an empty vector) is NaN here and speaks for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.messages import HEAD_SIGNALS, TOKEN_SIGNALS
from telemetry.signals import LayerBatch

Floats = NDArray[np.float64]


class LayerRow(NamedTuple):
    """Layer detail of one token: `heads` [HEAD_SIGNALS, layers, heads], of the layers named in `layers`."""

    step: int
    layers: Sequence[int]
    heads: NDArray[Any]


class Response(NamedTuple):
    """One response: `tokens` [T, TOKEN_SIGNALS], the layer rows there are, tokens of its first sentence, and
    the kind of its prompt, if that is known."""

    tokens: Any
    layers: Sequence[LayerRow] = ()
    sentence: int | None = None
    group: str = ""


def token_array(tokens: Any) -> tuple[Floats, NDArray[np.intp]]:
    """Return the usable tokens [T, TOKEN_SIGNALS] and their steps [T].

    A token without confidence, entropy or surprisal is left out; other signals may be NaN. Raises
    ValueError for rows of another width.
    """
    array = _numbers(tokens)
    if array.size == 0:
        array = np.empty((0, len(TOKEN_SIGNALS)))
    if array.ndim != 2 or array.shape[1] != len(TOKEN_SIGNALS):
        raise ValueError(f"token rows have {len(TOKEN_SIGNALS)} signals, these are {list(array.shape)}")
    steps = np.flatnonzero(np.isfinite(array[:, NEEDED]).all(1))
    return array[steps], steps


def layer_row(step: int, layers: Sequence[int], heads: Any) -> LayerRow | None:
    """Return a layer row with NaN for what is absent, None when nothing is there.

    `heads` is [HEAD_SIGNALS, layers, heads]; raises ValueError for any other shape.
    """
    array = _numbers(heads)
    if array.size == 0 or not np.isfinite(array).any():
        return None
    if array.ndim != 3 or array.shape[:2] != (len(HEAD_SIGNALS), len(layers)):
        raise ValueError(
            f"head signals are [{len(HEAD_SIGNALS)}, {len(layers)}, heads], these are {list(array.shape)}"
        )
    return LayerRow(step, layers, array)


def rows_of(batch: LayerBatch) -> Iterator[tuple[str, int, LayerRow]]:
    """Yield (request id, choice, layer row) of a batch."""
    keys = zip(batch.request_ids, batch.choices, batch.steps, batch.heads, strict=True)
    for request_id, choice, step, heads in keys:
        yield request_id, choice, LayerRow(step, batch.layers, heads)


def recorded(row: Mapping[str, Any]) -> LayerRow | None:
    """Return a row of the `layers` records (`telemetry.record`) as a layer row."""
    size = len(row["layers"]) * row["heads"]
    columns = [row.get(name) for name in HEAD_SIGNALS]
    flat = [column if column is not None and len(column) == size else [None] * size for column in columns]
    return layer_row(row["step"], row["layers"], _numbers(flat).reshape(len(flat), -1, row["heads"]))


def usable(layers: Iterable[LayerRow | None] | None) -> list[LayerRow]:
    """Return the layer rows that hold anything."""
    rows = [row for row in layers or () if row is not None]
    return [found for row in rows if (found := layer_row(*row)) is not None]


def _numbers(values: Any) -> Floats:
    if values is None:
        return np.empty(0)
    array = np.array(values, dtype=np.float64)  # None becomes NaN, a bool 0 or 1
    array[~np.isfinite(array)] = np.nan
    return array


SURPRISAL, CONFIDENCE, MARGIN, RANK, ENTROPY, SURPRISAL_POST, ENTROPY_POST = map(
    TOKEN_SIGNALS.index,
    ("surprisal", "confidence", "margin", "rank", "entropy", "surprisal_post", "entropy_post"),
)
NEEDED = [SURPRISAL, CONFIDENCE, ENTROPY]
