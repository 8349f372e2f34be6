"""What a run of load is: who asks, when, what, and how long; the same for our own runner and for Locust."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from chaos.load.arrivals import Arrival, bursts, poisson, replay, within
from chaos.load.questions import sized, supply
from chaos.load.readers import Question
from chaos.load.reading import Patience
from chaos.load.slo import Slo
from engine.words import convert

_PREFIX = "QUAVER_LOAD_"


class PlanError(ValueError):
    """A plan that cannot be run; the message says what to change."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One run, bounded by `seconds` and `count`.

    Open loop: `rate` (Poisson; with `burst_rate` in the last `burst_s` of every `burst_every_s`), or `trace`
    replayed `speed` times as fast. Closed loop, without either: `users` ask again as soon as they have read.
    """

    seconds: float = 60.0
    count: int = 10_000
    users: int = 8
    rate: float = 0.0
    burst_rate: float = 0.0
    burst_s: float = 5.0
    burst_every_s: float = 30.0
    trace: str = ""
    speed: float = 1.0
    at_once: int = 512
    max_tokens: int = 48
    patience_s: float = 20.0
    slo: str = ""
    seed: int = 0
    out: str = "load"

    @classmethod
    def from_env(cls) -> Plan:
        """Read `QUAVER_LOAD_SECONDS`, `QUAVER_LOAD_RATE` and so on. Raises PlanError on a bad value."""
        found = {
            name: value for name in cls.__struct_fields__ if (value := os.environ.get(_PREFIX + name.upper()))
        }
        try:
            return convert(found, cls, strict=False)
        except ValueError as error:
            raise PlanError(f"{_PREFIX}…: {error}") from None

    def to_env(self) -> dict[str, str]:
        """Return the plan as the variables that `from_env` reads."""
        return {_PREFIX + name.upper(): str(getattr(self, name)) for name in self.__struct_fields__}

    @property
    def loop(self) -> Literal["open", "closed"]:
        """Tell whether requests come when they are due, or when an answer has been read."""
        return "open" if self.rate or self.trace else "closed"

    @property
    def limits(self) -> Slo:
        """What a request must keep to count as good. Raises SloError."""
        return Slo.parse(self.slo)

    @property
    def patience(self) -> Patience:
        """Return the readers' patience. Texts of recorded lengths are not read, only waited for."""
        return Patience(median_s=self.patience_s, reads=not self.trace)

    def check(self) -> None:
        """Raise PlanError, SloError or TraceError where the plan contradicts itself or cannot be read."""
        for name, value in msgspec.structs.asdict(self).items():
            if isinstance(value, float) and not math.isfinite(value):
                raise PlanError(f"{name.replace('_', '-')} cannot be {value}: give a number")
        _ = self.limits
        if self.rate and self.trace:
            raise PlanError("a trace has its own arrivals: give either --trace or --rate")
        if self.burst_rate and not self.rate:
            raise PlanError("--burst-rate is the rate within bursts: give --rate for the time between them")
        if self.burst_rate and not 0 < self.burst_s < self.burst_every_s:
            raise PlanError(f"a burst of {self.burst_s:g} s does not fit into every {self.burst_every_s:g} s")
        if self.trace:
            for _ in within(self.arrivals(), self.seconds, self.count):
                pass

    def arrivals(self) -> Iterator[Arrival]:
        """Return the arrivals of an open loop, fixed by the seed alone."""
        rng = random.Random(f"arrivals/{self.seed}")
        if self.trace:
            return replay(Path(self.trace), self.speed)
        if self.burst_rate:
            return bursts(self.rate, self.burst_rate, self.burst_s, self.burst_every_s, rng)
        return poisson(self.rate, rng)

    def questions(self) -> Iterator[Question]:
        """Return what the users of a closed loop ask, without end."""
        return supply("demo", max_tokens=self.max_tokens, seed=self.seed)

    def due(self) -> Iterator[tuple[Question, float]]:
        """Yield what an open loop asks and when, in seconds after the start, within the bounds."""
        arrivals = within(self.arrivals(), self.seconds, self.count)
        for question, arrival in zip(self.questions(), arrivals, strict=False):
            yield sized(question, arrival.prompt_tokens, arrival.output_tokens), arrival.at_s
