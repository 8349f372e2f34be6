"""One reader's way through one answer: what came when, and how it ended."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec

from chaos.load.judge import Judge, Verdict

Outcome = Literal["read", "left", "shed", "failed", "ended"]  # ended: with the run, neither done nor left
Left = Literal["impatient", "repeats", "unreadable"]

_EPOCH = time.time() - time.perf_counter()


def now() -> float:
    """Return unix time that never jumps: the wall clock of the start plus what has passed since."""
    return _EPOCH + time.perf_counter()


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    completion_tokens: Annotated[int, msgspec.Meta(ge=0, lt=2**31)] | None = None
    prompt_tokens: Annotated[int, msgspec.Meta(ge=0, lt=2**31)] | None = None


class _Event(msgspec.Struct):
    """What a reader understands of one event of a stream."""

    id: str | None = None
    error: Any = None
    usage: _Usage | None = None
    choices: list[_Choice] | None = None


_events = msgspec.json.Decoder(_Event)


@dataclass(frozen=True)
class Patience:
    """Seconds a reader stays, lognormal; a bad text shortens what is left to a reaction time.

    Who does not read (`reads`) leaves by the time alone.
    """

    median_s: float = 20.0
    sigma: float = 0.6
    reaction_s: float = 0.3
    reaction_sigma: float = 0.5
    reads: bool = True

    def draw(self, rng: random.Random) -> float:
        """Return the seconds one reader waits for an answer that reads well."""
        return self.median_s * math.exp(rng.gauss(0.0, self.sigma))

    def draw_reaction(self, rng: random.Random) -> float:
        """Return the seconds between seeing a bad text and closing the socket."""
        return self.reaction_s * math.exp(rng.gauss(0.0, self.reaction_sigma))


@dataclass(kw_only=True)
class Reading:
    """What became of one request. Times are seconds; `started` and `intended` are unix time."""

    intended: float
    started: float
    duration_s: float = 0.0
    request_id: str | None = None
    outcome: Outcome = "failed"
    left: Left | None = None
    error: str | None = None
    retry_after_s: float | None = None
    first_token_s: float | None = None
    text: str = ""
    tokens: int = 0
    prompt_tokens: int = 0
    gaps: list[float] = field(default_factory=list)  # between chunks that carried text
    finish_reason: str | None = None

    def fail(self, why: str) -> None:
        """Note why there is no answer, in words that any file takes and no server makes long."""
        self.error = why.encode(errors="replace").decode()[:200]

    @property
    def start_delay_s(self) -> float:
        """How much later than intended the request was sent."""
        return self.started - self.intended

    @property
    def first_token_due_s(self) -> float | None:
        """Seconds from the intended start to the first token, None without one."""
        return None if self.first_token_s is None else self.start_delay_s + self.first_token_s

    @property
    def duration_due_s(self) -> float:
        """Seconds from the intended start to the end."""
        return self.start_delay_s + self.duration_s

    @property
    def per_output_token_s(self) -> float | None:
        """Mean seconds per token after the first, None for answers shorter than two tokens."""
        if self.tokens < 2 or not self.gaps:
            return None
        return sum(self.gaps) / (self.tokens - 1)

    def token_gaps(self) -> Iterator[tuple[float, int]]:
        """Yield (seconds per token, tokens): a chunk of several tokens counts as that many."""
        if not self.gaps:
            return
        share = max(1.0, (self.tokens - 1) / len(self.gaps))
        for gap in self.gaps:
            yield gap / share, round(share)


class Screen:
    """Takes the lines of an event stream as they come and keeps a `Reading` up to date."""

    def __init__(self, reading: Reading, question: str, patience: Patience, rng: random.Random) -> None:
        self.reading = reading
        self.done = False
        self._judge = Judge(question)
        self._patience = patience
        self._rng = rng
        self._last: float | None = None
        self.stays_s = patience.draw(rng)
        self.verdict: Verdict | None = None

    def line(self, line: str, now_s: float) -> None:
        """Take one line of the stream, `now_s` seconds after the request was sent.

        A chunk without text (the role, the usage) is no token. Raises ValueError on a stream
        that is not made of events, or that reports an error.
        """
        if not line.startswith("data:"):
            return
        data = line[5:].strip()
        if data == "[DONE]":
            self.done = True
            return
        try:
            event = _events.decode(data)
        except (msgspec.DecodeError, RecursionError):
            raise ValueError("the stream has an event that is none of a chat completion") from None
        if event.error:
            told = event.error if isinstance(event.error, dict) else {"message": event.error}
            raise ValueError(f"stream: {told.get('code') or told.get('message')}")
        reading = self.reading
        reading.request_id = event.id or reading.request_id
        if event.usage is not None:
            if event.usage.completion_tokens is not None:
                reading.tokens = event.usage.completion_tokens
            reading.prompt_tokens = event.usage.prompt_tokens or 0
        for choice in event.choices or ():
            reading.finish_reason = choice.finish_reason or reading.finish_reason
            text = (choice.delta and choice.delta.content) or choice.text
            if text:
                self._text(text, now_s)

    def _text(self, text: str, now_s: float) -> None:
        reading = self.reading
        if reading.first_token_s is None:
            reading.first_token_s = now_s
        elif self._last is not None:
            reading.gaps.append(now_s - self._last)
        self._last = now_s
        reading.tokens += 1
        reading.text += text
        if self._patience.reads and self.verdict is None:
            self.verdict = self._judge.verdict(reading.text)
            if self.verdict:
                self.stays_s = min(self.stays_s, now_s + self._patience.draw_reaction(self._rng))

    def finish(self, now_s: float, *, over: bool = False) -> None:
        """Close the reading of a stream that ended by itself, or that the reader left.

        `over`: the run ended before the reader did either.
        """
        self.reading.duration_s = now_s
        if self.done or over:
            self.reading.outcome = "read" if self.done else "ended"
            return
        self.reading.outcome = "left"
        self.reading.left = self.verdict or "impatient"
