"""What is known of each request between its start and its end."""

from __future__ import annotations

from dataclasses import dataclass, field

from opentelemetry.trace import SpanContext

from engine.hooks import RequestStarted
from engine.messages import Finish
from telemetry.sentence import FirstSentence


@dataclass(slots=True)
class OpenChoice:
    """One choice of a request; times are unix seconds, steps the engine's."""

    row: int  # its row in the arrays of running responses
    tokens: int = 0
    first_time: float | None = None
    last_time: float | None = None
    first_step: int = 0
    last_step: int = 0
    finish: Finish | None = None
    sentence: FirstSentence = field(default_factory=FirstSentence)


@dataclass(slots=True)
class OpenRequest:
    """One request; the span and trace ids are drawn at its start, the spans made at its end."""

    started: RequestStarted
    route: str  # label value
    route_index: int
    tenant: str  # label value
    parent: SpanContext | None
    trace_id: int
    span_id: int
    upstream_step: int | None
    choices: dict[int, OpenChoice]
    faults: list[str]
    alerts: list[tuple[float, str]] = field(default_factory=list)
    annotations: dict[str, str | int | float | bool] = field(default_factory=dict)

    @property
    def trace(self) -> str:
        """Trace id as 32 hexadecimal digits."""
        return f"{self.trace_id:032x}"

    def touch(self, faults: list[str]) -> None:
        """Remember faults that acted on the request, each once."""
        self.faults.extend(fault for fault in faults if fault not in self.faults)
