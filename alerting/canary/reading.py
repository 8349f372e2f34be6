"""What is kept of a canary's answer: means over its first sentence, and what every head did."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from alerting.scores.response import SENTENCE_TOKENS
from engine.messages import TOKEN_SIGNALS
from telemetry.signals import BusinessEvent, LayerBatch, Lost, ResponseEnded, ResponseStarted, TokenBatch

#: Token signals whose means are compared.
SIGNALS = ("entropy", "confidence", "entropy_post", "surprisal_post")
_COLUMNS = [TOKEN_SIGNALS.index(name) for name in SIGNALS]

Array = NDArray[np.float32]


@dataclass(frozen=True)
class Reading:
    """One whole answer. `means` [SIGNALS] over its first sentence; `heads` and `onset`
    [head signals, layers, heads] over that sentence and of its first token. NaN is absent."""

    means: Array
    heads: Array
    onset: Array


@dataclass
class _Open:
    rows: list[Array] = field(default_factory=list)
    heads: list[Array] = field(default_factory=list)  # of every layer, in the order of the tokens
    sentence: int = SENTENCE_TOKENS

    def reading(self) -> Reading | None:
        if not self.rows or not self.heads:
            return None
        rows = np.stack(self.rows[: self.sentence])
        heads = np.stack(self.heads[: self.sentence])
        return Reading(_mean(rows), _mean(heads), heads[0])


class Reader:
    """A SignalSink that follows the answers it was told to `expect`, and no others."""

    def __init__(self) -> None:
        self._open: dict[str, _Open] = {}
        self._done: dict[str, Reading] = {}

    def expect(self, request_id: str) -> None:
        """Follow a request that is about to be sent; `take` or `forget` must come after it."""
        self._open[request_id] = _Open()

    def take(self, request_id: str) -> Reading | None:
        """Return what an answer that is over left; None when it did not end by itself or lacks signals."""
        self._open.pop(request_id, None)
        return self._done.pop(request_id, None)

    def on_started(self, event: ResponseStarted) -> None:
        """Nothing to learn."""

    def on_lost(self, request_id: str, choice: int, what: Lost) -> None:
        """An answer that is not whole is compared with nothing."""
        self._open.pop(request_id, None)

    def on_tokens(self, batch: TokenBatch) -> None:
        """Keep the rows of expected answers."""
        if self._open:
            for i, request_id in enumerate(batch.request_ids):
                entry = self._open.get(request_id)
                if entry is not None and batch.choices[i] == 0 and len(entry.rows) < entry.sentence:
                    entry.rows.append(np.asarray(batch.signals[i, _COLUMNS], np.float32))

    def on_layers(self, batch: LayerBatch) -> None:
        """Keep the heads of expected answers, where every layer is there."""
        if self._open and batch.stride == 1:
            for i, request_id in enumerate(batch.request_ids):
                entry = self._open.get(request_id)
                if entry is not None and batch.choices[i] == 0 and len(entry.heads) < entry.sentence:
                    entry.heads.append(np.asarray(batch.heads[i], np.float32))

    def on_sentence(self, request_id: str, choice: int, tokens: int) -> None:
        """The rest of the answer does not count."""
        entry = self._open.get(request_id)
        if entry is not None and choice == 0:
            entry.sentence = max(1, min(entry.sentence, tokens))

    def on_ended(self, event: ResponseEnded) -> None:
        """Sum up an answer that reached its own end."""
        entry = self._open.pop(event.request_id, None)
        if entry is not None and event.finish_reason in ("stop", "length") and not event.disconnected:
            reading = entry.reading()
            if reading is not None:
                self._done[event.request_id] = reading

    def on_business(self, event: BusinessEvent) -> None:
        """Canaries are nobody's business."""


def _mean(values: Array) -> Array:
    """Means over the first axis of what is there; NaN where nothing is."""
    there = np.isfinite(values)
    sums = np.where(there, values, 0).sum(0, dtype=np.float64)
    with np.errstate(invalid="ignore"):
        found: Array = np.where(there.any(0), sums / there.sum(0), math.nan).astype(np.float32)
    return found
