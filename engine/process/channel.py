"""The stream of one request's tokens, from the dispatch of steps to the request's reader."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from engine.messages import TOKEN_SIGNALS, Finish, FinishReason, StepOutput

_WIDTH = len(TOKEN_SIGNALS)
_SURPRISAL = TOKEN_SIGNALS.index("surprisal")
#: What stands for a log-probability that is not finite, as JSON has no infinity.
LOWEST_LOGPROB = -9999.0


class Token(NamedTuple):
    """One emitted token; log-probabilities from the raw distribution, in nats."""

    choice: int
    token_id: int
    logprob: float
    alternatives: list[tuple[int, float]]


class Batch:
    """What one step brought to one request. `arrived` is `time.perf_counter` in the front."""

    __slots__ = ("arrived", "faults", "finished", "tokens")

    def __init__(self, arrived: float) -> None:
        self.arrived = arrived
        self.tokens: list[Token] = []
        self.finished: list[Finish] = []
        self.faults: list[str] = []


class Channel:
    """Batches of one request, in order. `open` are the choices without a Finish so far."""

    def __init__(self, request_id: str, choices: list[int]) -> None:
        self.request_id = request_id
        self.open = set(choices)
        self._queue: asyncio.Queue[Batch | None] = asyncio.Queue()

    async def get(self) -> Batch | None:
        """Return the next batch, or None after `interrupt`."""
        return await self._queue.get()

    def interrupt(self) -> None:
        """Wake the reader: something other than the engine wants the request to end."""
        self._queue.put_nowait(None)

    def put(self, batch: Batch) -> None:
        """Deliver a batch."""
        self.open.difference_update(finish.choice for finish in batch.finished)
        self._queue.put_nowait(batch)

    def fail(self, reason: FinishReason, error: str) -> None:
        """End every open choice on behalf of an engine that cannot."""
        if not self.open:
            return
        batch = Batch(time.perf_counter())
        for choice in sorted(self.open):
            batch.finished.append(
                Finish(
                    request_id=self.request_id,
                    choice=choice,
                    reason=reason,
                    error=error,
                    prompt_tokens=0,
                    completion_tokens=0,
                    queued_s=0.0,
                    prefill_s=0.0,
                )
            )
        self.put(batch)


def deliver(output: StepOutput, channels: Mapping[str, Channel]) -> None:
    """Split a step's columns by request and put each part into its channel."""
    now = time.perf_counter()
    batches: dict[str, Batch] = {}

    def batch_of(request_id: str) -> Batch | None:
        if request_id not in channels:
            return None
        return batches.get(request_id) or batches.setdefault(request_id, Batch(now))

    if output.request_ids:
        ids = np.frombuffer(output.token_ids, "<i4").tolist()
        surprisals = np.frombuffer(output.signals, "<f4").reshape(-1, _WIDTH)[:, _SURPRISAL].tolist()
        alternatives = {
            row: list(zip(output.logprob_ids[i], map(finite, output.logprobs[i]), strict=True))
            for i, row in enumerate(output.logprob_rows)
        }
        for i, request_id in enumerate(output.request_ids):
            batch = batch_of(request_id)
            if batch is not None:
                batch.tokens.append(
                    Token(output.choices[i], ids[i], finite(-surprisals[i]), alternatives.get(i, []))
                )
    for request_id, faults in output.touched.items():
        batch = batch_of(request_id)
        if batch is not None:
            batch.faults += faults
    for finish in output.finished:
        batch = batch_of(finish.request_id)
        if batch is not None:
            batch.finished.append(finish)
    for request_id, batch in batches.items():
        channels[request_id].put(batch)


def finite(logprob: float) -> float:
    """Return a log-probability that JSON can carry."""
    return logprob if math.isfinite(logprob) else LOWEST_LOGPROB
