"""Steady traffic in the background, and windows cut out of it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from chaos.load.readers import Question, Readers, closed_loop
from chaos.load.reading import Reading

Progress = Callable[[int], None]


@dataclass(frozen=True)
class Window:
    """What was asked and answered between two moments (unix seconds)."""

    started: float
    ended: float
    answers: tuple[tuple[Question, Reading], ...]

    def completed(self) -> list[tuple[Question, Reading]]:
        """Return the answers that were read to their end."""
        return [(question, reading) for question, reading in self.answers if reading.outcome == "read"]

    def count(self, outcome: str) -> int:
        """Return how many readings ended with an outcome."""
        return sum(reading.outcome == outcome for _, reading in self.answers)


class Traffic:
    """A fixed number of readers who ask one question after the other until stopped."""

    def __init__(self, readers: Readers, questions: Iterable[Question], streams: int) -> None:
        self._readers = readers
        self._questions = questions
        self._streams = streams
        self._stopping = False
        self._answers: list[tuple[Question, Reading]] = []
        self._news = asyncio.Event()
        self._pump: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Traffic:
        self._pump = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._stopping = True
        if self._pump is None:
            return
        if exc[0] is not None:
            self._pump.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._pump

    async def _run(self) -> None:
        flow = closed_loop(self._readers, self._questions, self._streams, lambda: self._stopping)
        async with contextlib.aclosing(flow):
            async for question, reading in flow:
                self._answers.append((question, reading))
                self._news.set()

    def since(self, moment: float) -> list[tuple[Question, Reading]]:
        """Return the readings that started at or after a moment and have ended."""
        return [pair for pair in self._answers if pair[1].started >= moment]

    def over_since(self, moment: float) -> list[Reading]:
        """Return the readings that ended at or after a moment, whenever they began."""
        return [r for _, r in self._answers if r.started + r.duration_s >= moment]

    async def drained(self, moment: float, limit_s: float) -> None:
        """Wait until every question asked before a moment is over, or the limit has passed."""
        end = time.monotonic() + limit_s
        while self._asked_before(moment) and time.monotonic() < end:  # noqa: ASYNC110
            await asyncio.sleep(0.1)

    def _asked_before(self, moment: float) -> bool:
        return any(started < moment for started in self._readers.open)

    async def window(
        self, responses: int, limit_s: float, progress: Progress | None = None, *, fresh: bool = True
    ) -> Window:
        """Watch until so many answers are over, or the limit has passed.

        `fresh` counts only what was asked from now on; without it, answers under way count too.
        Refused requests are kept but are no responses.
        """
        started = time.time()
        end = time.monotonic() + limit_s
        before = len(self._answers)
        while True:
            self._news.clear()
            answers = self.since(started) if fresh else self._answers[before:]
            served = self.served(answers)
            if progress:
                progress(min(served, responses))
            if served >= responses or time.monotonic() >= end:
                return Window(started, time.time(), tuple(answers))
            if self._pump is not None and self._pump.done():
                self._pump.result()
                return Window(started, time.time(), tuple(answers))
            # Not wait_for: in Python 3.11 it can swallow a cancellation that comes together with news.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.5):
                    await self._news.wait()

    @staticmethod
    def served(answers: Sequence[tuple[Question, Reading]]) -> int:
        """Return how many answers began to be read, whether or not the reader stayed."""
        return sum(reading.outcome in ("read", "left") for _, reading in answers)

    def why_not(self) -> str:
        """Return the commonest error so far, in words."""
        errors = Counter(reading.error for _, reading in self._answers if reading.error)
        return errors.most_common(1)[0][0] if errors else "no answer in time"
