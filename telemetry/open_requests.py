"""What is known of each request between its start and its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from opentelemetry.trace import SpanContext

from engine.hooks import RequestStarted
from engine.messages import Finish
from telemetry import columns
from telemetry.joint import Running
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

    def emitted(self, step: int, time: float) -> None:
        """Count a token."""
        if self.first_time is None:
            self.first_time, self.first_step = time, step
        self.last_time, self.last_step = time, step
        self.tokens += 1


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
    faults: list[str]
    choices: dict[int, OpenChoice] = field(default_factory=dict)
    alerts: list[tuple[float, str]] = field(default_factory=list)
    annotations: dict[str, str | int | float | bool] = field(default_factory=dict)
    lost: Counter[str] = field(default_factory=Counter)  # of its detail, by table: tokens, layers

    @property
    def trace(self) -> str:
        """Trace id as 32 hexadecimal digits."""
        return f"{self.trace_id:032x}"

    @property
    def last_step(self) -> int | None:
        """Engine step of its last token; None before the first."""
        return max((choice.last_step for choice in self.choices.values() if choice.tokens), default=None)

    def touch(self, faults: list[str]) -> None:
        """Remember faults that acted on the request, each once."""
        self.faults.extend(fault for fault in dict.fromkeys(faults) if fault not in self.faults)


class OpenRequests:
    """The requests in progress and the rows of their choices in `running`."""

    def __init__(self) -> None:
        self.running = Running()
        self._requests: dict[str, OpenRequest] = {}
        self._choices: dict[tuple[str, int], OpenChoice] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[OpenRequest]:
        return iter(list(self._requests.values()))

    def add(self, request: OpenRequest) -> None:
        """Open a request and give each of its choices a row."""
        request_id = request.started.meta.request_id
        for number in range(request.started.choices):
            choice = OpenChoice(self.running.take(request.route_index, request.trace))
            request.choices[number] = self._choices[request_id, number] = choice
        self._requests[request_id] = request

    def find(self, request_id: str) -> OpenRequest | None:
        """Return a request that is open."""
        return self._requests.get(request_id)

    def choice(self, request_id: str, number: int) -> OpenChoice | None:
        """Return a choice that is open."""
        return self._choices.get((request_id, number))

    def emitted(self, step: columns.Step) -> tuple[columns.Step, list[OpenChoice]]:
        """Count the tokens of a step; return its rows whose choice is open, and those choices."""
        found = [self._choices.get(key) for key in zip(step.request_ids, step.choices, strict=True)]
        if None in found:
            step = columns.keep(step, [row for row, choice in enumerate(found) if choice is not None])
        choices = [choice for choice in found if choice is not None]
        for choice in choices:
            choice.emitted(step.step, step.time)
        return step, choices

    def end_choices(self, request: OpenRequest) -> None:
        """No more tokens follow; the request itself stays until `remove`."""
        for number, choice in request.choices.items():
            self.running.give_back(choice.row)
            del self._choices[request.started.meta.request_id, number]

    def remove(self, request_id: str) -> None:
        """Forget a request."""
        del self._requests[request_id]
