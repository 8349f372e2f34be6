"""A simulated service: responses with dependent tokens, told to a SignalSink as telemetry tells them."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from alerting.alerts import Alert, AlertBook
from alerting.baseline import Baseline
from alerting.breaker import Breaker
from alerting.collector import Collector
from alerting.evaluator import Evaluator
from alerting.metrics import AlertMetrics
from alerting.rules import Rules, load_rules
from engine.messages import TOKEN_SIGNALS
from telemetry.signals import BusinessEvent, ResponseEnded, ResponseStarted, SignalSink, TokenBatch

MODEL = "toy"


class Service:
    """Draws responses and tells sinks about them. `now` is unix seconds and moves with the tokens.

    Tokens share a level per response and follow each other by AR(1): they are far from independent.
    """

    def __init__(self, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)
        self._ids = itertools.count()
        self.now = 1_700_000_000.0

    def rows(self, tokens: int, shift: float = 0.0, noise: float = 0.0) -> np.ndarray:
        """Return float32 [tokens, signals]; `shift` raises entropy, `noise` the excess surprisal."""
        level = self._rng.normal(0, 0.35)
        wave = np.zeros(tokens)
        for i in range(1, tokens):
            wave[i] = 0.8 * wave[i - 1] + self._rng.normal(0, 0.3)
        entropy = np.exp(0.1 + 0.5 * (level + shift) + 0.4 * wave)
        surprisal = entropy * self._rng.exponential(0.8, tokens) + noise
        rows = np.ones((tokens, len(TOKEN_SIGNALS)), dtype=np.float32)
        rows[:, TOKEN_SIGNALS.index("entropy")] = rows[:, TOKEN_SIGNALS.index("entropy_post")] = entropy
        rows[:, TOKEN_SIGNALS.index("surprisal")] = rows[:, TOKEN_SIGNALS.index("surprisal_post")] = surprisal
        rows[:, TOKEN_SIGNALS.index("confidence")] = np.exp(-surprisal)
        return rows

    def respond(
        self,
        sink: SignalSink,
        rows: np.ndarray,
        *,
        route: str = "qa",
        tenant: str = "a",
        leave_after: int | None = None,
        canary: bool = False,
        temperature: float = 0.0,
        seconds: float = 1.0,
        request_id: str | None = None,
        outcome: bool = True,
    ) -> str:
        """Tell one whole response to a sink; the user leaves after so many tokens, if at all."""
        request_id = request_id or f"r{next(self._ids)}"
        sink.on_started(
            ResponseStarted(
                request_id=request_id,
                tenant=tenant,
                route=route,
                canary=canary,
                model=MODEL,
                temperature=temperature,
                prompt_tokens=10,
                time=self.now,
            )
        )
        sentence = min(12, len(rows))
        seen = len(rows) if leave_after is None else min(leave_after, len(rows))
        for step in range(seen):
            self.now += seconds / len(rows)
            sink.on_tokens(
                TokenBatch(
                    time=self.now,
                    request_ids=[request_id],
                    choices=[0],
                    steps=[step],
                    signals=rows[step : step + 1],
                )
            )
            if step + 1 == sentence:
                sink.on_sentence(request_id, 0, sentence)
        left = seen < len(rows)
        if left and seen < sentence:
            sink.on_sentence(request_id, 0, seen)
        sink.on_ended(
            ResponseEnded(
                request_id=request_id,
                time=self.now,
                finish_reason="abort" if left else "stop",
                disconnected=left,
                completion_tokens=seen,
                aggregates={},
            )
        )
        if outcome and not canary:
            kind = "interrupted" if left else "completed"
            sink.on_business(
                BusinessEvent(kind=kind, request_id=request_id, tenant=tenant, route=route, time=self.now)
            )
        return request_id

    def baseline(self, rules: Rules, responses: int = 200, route: str = "qa") -> Baseline:
        """Collect healthy responses and build a baseline from them."""
        collector = Collector(rules)
        for _ in range(responses):
            self.respond(collector, self.rows(24), route=route)
        return collector.build(quantization="none")


@dataclass
class Watch:
    """An evaluator with everything around it, and what it told."""

    evaluator: Evaluator
    breaker: Breaker
    book: AlertBook
    registry: CollectorRegistry
    changes: list[Alert] = field(default_factory=list)
    l1: list[str] = field(default_factory=list)

    def active(self) -> set[str]:
        """Return the names of the alerts that fire."""
        return {alert.name for alert in self.book.active.values()}

    def raised(self, name: str) -> int:
        """Return how often an alert began."""
        return sum(a.name == name and a.state == "firing" for a in self.changes)


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
def rules() -> Rules:
    return load_rules()


@pytest.fixture
def watch(rules: Rules, service: Service) -> Callable[..., Watch]:
    packaged = rules

    def make(
        preset: str = "quantile",
        baseline: Baseline | None = None,
        mode: str = "observe",
        rules: Rules = packaged,
    ) -> Watch:
        changes: list[Alert] = []
        l1: list[str] = []
        registry = CollectorRegistry()
        breaker = Breaker(rules.breaker, mode, clock=lambda: service.now)  # type: ignore[arg-type]
        book = AlertBook(changes.append)
        evaluator = Evaluator(
            rules,
            preset,
            book,
            breaker,
            AlertMetrics(registry),
            clock=lambda: service.now,
            on_l1=lambda request_id, _: l1.append(request_id),
        )
        evaluator.use(baseline)
        return Watch(evaluator, breaker, book, registry, changes, l1)

    return make


@pytest.fixture
def unused_port() -> int:
    """A TCP port nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
