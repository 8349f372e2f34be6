"""The fast path: signals in, alerts out, in process, with a pass every 100 ms.

Sees only `telemetry.signals`: no fault state, no annotations. Choice 0 stands for its response;
canaries stay out.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

from alerting.alerts import AlertBook, rfc3339
from alerting.baseline import Baseline
from alerting.breaker import STATE_NUMBER, Breaker, Transition
from alerting.judge import Judge, Verdict
from alerting.metrics import AlertMetrics
from alerting.open_response import MAX_OPEN, JudgedResponse, OpenResponses, complete
from alerting.pager import Pager
from alerting.route import RouteEvidence
from alerting.rules import AlertRule, RawPreset, Rules
from alerting.statistics import temperature_band
from alerting.traffic import EVERYWHERE, Traffic
from telemetry.signals import BusinessEvent, LayerBatch, Lost, ResponseEnded, ResponseStarted, TokenBatch

MAX_ROUTES = 64
_OVERFLOW_ROUTE = "other"
_BLIND_AFTER = 5  # responses in a row that could not be judged


class Evaluator:
    """A SignalSink that judges every response and keeps the alerts of every route."""

    def __init__(
        self,
        rules: Rules,
        preset: str,
        book: AlertBook,
        breaker: Breaker,
        metrics: AlertMetrics,
        *,
        clock: Callable[[], float] = time.time,
        on_l1: Callable[[str, str], None] | None = None,
        on_verdict: Callable[[str, Verdict], None] | None = None,
    ) -> None:
        """`on_l1(request_id, name)` hears which response raised an L1 of the paging preset, and its cause;
        `on_verdict(request_id, verdict)` how that preset judged a response that is over."""
        self.preset = preset
        self._rules = rules
        self._pager = Pager(rules, book, breaker)
        self.traffic = Traffic(rules, book)
        self._breaker = breaker
        self._metrics = metrics
        self._clock = clock
        self._on_l1 = on_l1
        self._on_verdict = on_verdict
        self._judges = {name: Judge(name, rules) for name in rules.presets}
        self._raw = {n: p for n, p in rules.presets.items() if isinstance(p, RawPreset)}
        self._open: OpenResponses[JudgedResponse] = OpenResponses(self._raw)
        self._outcomes: OrderedDict[str, None] = OrderedDict()
        self._routes: dict[str, RouteEvidence] = {}
        self._baseline: Baseline | None = None
        self._engine: tuple[str | None, str | None] = (None, None)
        self._mismatch: str | None = "no baseline; run `quaver calibrate`"
        self.events: deque[dict[str, Any]] = deque(maxlen=200)
        breaker.listeners.append(self._on_transition)

    def use(
        self, baseline: Baseline | None, model: str | None = None, quantization: str | None = None
    ) -> None:
        """Put a baseline in force for the model that runs; evidence so far is dropped, its alerts end."""
        self._baseline = baseline
        self._engine = (model, quantization)
        for evidence in self._routes.values():
            self._pager.end_all(evidence, self._clock(), "another baseline is in force")
        known, self._routes = list(self._routes), {}
        self._apply(model)
        for name in known:  # so that the gauges tell of now
            self._route(name)

    def on_started(self, event: ResponseStarted) -> None:
        """Open a response."""
        if event.canary:
            return
        self.traffic.add(event.route, event.prompt_tokens, event.time)
        if event.model != self._engine[0]:
            self._engine = (event.model, self._engine[1])
            self._apply(event.model)
        band = temperature_band(event.temperature)
        usable = self._baseline if self._baseline is not None and not self._mismatch else None
        frozen = None if usable is None else usable.frozen.get(band)
        limit = self._judges[self.preset].reaches_l1(event.route, band, "cusum:high")
        self._open.open(JudgedResponse(event, frozen, limit))

    def on_lost(self, request_id: str, choice: int, what: Lost) -> None:
        """What a response lost speaks neither for health nor against it."""
        self._open.lose(request_id, choice, what)

    def on_tokens(self, batch: TokenBatch) -> None:
        """Take tokens in; an L1 is raised as soon as it is certain."""
        for entry, _, raw in self._open.feed(batch):
            for name in raw:
                self._raise_l1(entry, name, batch.time, "run_and_entropy")
            if entry.tracker.sentence and not entry.judged:
                self._judge_sentence(entry, batch.time)
            if entry.tracker.cusum > entry.cusum_limit and self.preset not in entry.l1:
                self._raise_l1(entry, self.preset, batch.time, "cusum:high")
            if self.preset in entry.l1 and self.preset not in self._raw:
                self._route(entry.started.route).keep_live(batch.time)

    def on_layers(self, batch: LayerBatch) -> None:
        """Take layer detail in, for the judgement at the end; what is of another model is left out."""
        for entry, row in self._open.details(batch):
            if entry.detail is not None:
                try:
                    entry.detail.add(row)
                except ValueError:
                    entry.detail = None

    def on_sentence(self, request_id: str, choice: int, tokens: int) -> None:
        """Mark the end of the first sentence; it is judged with the next token, or at the end.

        The text of a response that is broken off ends its sentence too, but nothing follows.
        """
        self._open.end_sentence(request_id, choice, tokens)

    def on_ended(self, event: ResponseEnded) -> None:
        """Judge the whole response and feed the detectors of its route."""
        entry = self._open.close(event.request_id)
        if entry is None:
            return
        verdicts = self._judge_whole(entry, event)
        route = entry.started.route
        evidence = self._route(route)
        evidence.lost.append(bool(entry.lost))
        for what in entry.lost:
            self._metrics.degraded.labels(evidence.name, what).inc()
        verdict = verdicts.get(self.preset)
        if verdict is not None:
            if self._on_verdict is not None:
                self._on_verdict(event.request_id, verdict)
            evidence.add_response(
                verdict,
                event.time,
                l1_frozen=self._pager.fires("l1_rate", evidence.name),
                joint_frozen=self._pager.fires("joint", evidence.name),
            )
        elif event.finish_reason in ("stop", "length"):
            evidence.unscored += 1
        healthy = None if event.finish_reason == "shed" else complete(event) and self.preset not in entry.l1
        self._breaker.ended(event.request_id, route, healthy)
        self._check(evidence, event.time)

    def on_business(self, event: BusinessEvent) -> None:
        """Take interruptions and completions in, one outcome a response."""
        if event.kind in ("rejected", "failed"):
            self._breaker.ended(event.request_id, event.route, None if event.kind == "rejected" else False)
        if event.kind not in ("interrupted", "completed") or event.request_id in self._outcomes:
            return
        self._outcomes[event.request_id] = None
        if len(self._outcomes) > MAX_OPEN:
            self._outcomes.popitem(last=False)
        evidence = self._route(event.route)
        evidence.add_outcome(
            event.tenant,
            event.kind == "interrupted",
            event.time,
            self._interruption_rate(event.route),
            joint_frozen=self._pager.fires("joint", evidence.name),
        )
        self._check(evidence, event.time)

    def tick(self) -> None:
        """One pass: the breaker's clock, alerts of silent routes, the gauges."""
        now = self._clock()
        self._breaker.tick()
        for evidence in self._routes.values():
            self._pager.check_quiet(evidence, now)
            self._export(evidence, now)
        rule = self._rules.alerts.traffic_changed
        self._metrics.alert_active.labels(rule.name, rule.level, EVERYWHERE).set(self.traffic.changed)
        self._metrics.heartbeat.set(now)

    def blind(self) -> dict[str, str]:
        """Return the routes that cannot be judged, and why."""
        return {name: why for name, e in self._routes.items() if (why := self._blind(e)) is not None}

    def report(self) -> dict[str, Any]:
        """Return the evaluator's state for people to read."""
        now = self._clock()
        return {
            "preset": self.preset,
            "baseline": self.baseline_summary(),
            "baseline_problem": self._mismatch,
            "blind": self.blind(),
            "too_calm": [name for name, e in self._routes.items() if e.too_calm],
            "traffic": self.traffic.evidence() | {"changed": self.traffic.changed},
            "routes": {name: e.evidence() | {"l1_live": e.is_live(now)} for name, e in self._routes.items()},
        }

    def alert_rules(self) -> list[AlertRule]:
        """Return the conditions watched here."""
        return [*self._pager.rules, self._rules.alerts.traffic_changed]

    def baseline_summary(self) -> dict[str, Any] | None:
        """Return what the baseline knows, and whether it holds for what runs."""
        if self._baseline is None:
            return None
        return self._baseline.summary() | {"usable": self._mismatch is None}

    def _apply(self, model: str | None) -> None:
        if self._baseline is None:
            self._mismatch = "no baseline; run `quaver calibrate`"
        else:
            self._mismatch = self._baseline.mismatch(self._rules, model, self._engine[1])
        for judge in self._judges.values():
            judge.use(None if self._mismatch else self._baseline)

    def _judge_sentence(self, entry: JudgedResponse, now: float) -> None:
        entry.judged = True
        band = temperature_band(entry.started.temperature)
        for name, judge in self._judges.items():
            if name in self._raw:
                continue
            verdict = judge.verdict(entry.started.route, band, entry.tracker.sentence, entry.raw_l1)
            if verdict is not None and verdict.l1:
                self._raise_l1(entry, name, now, verdict.cause)

    def _judge_whole(self, entry: JudgedResponse, event: ResponseEnded) -> dict[str, Verdict]:
        """A broken-off response is judged by its first sentence alone, and only if more followed it."""
        statistics = entry.tracker.sentence if entry.judged else {}
        if complete(event):
            entry.tracker.finish()
            statistics = entry.statistics()
        verdicts = {}
        for name, judge in self._judges.items():
            verdict = None
            if (
                entry.tracker.tokens
                and not entry.tracker.missing
                and "tokens" not in entry.lost
                and event.finish_reason not in ("error", "shed")
            ):
                band = temperature_band(entry.started.temperature)
                verdict = judge.verdict(
                    entry.started.route, band, statistics, entry.raw_l1, partial="layers" in entry.lost
                )
            if verdict is None:
                continue
            verdicts[name] = verdict
            self._metrics.scored.labels(self._route(entry.started.route).name, name).inc()
            if verdict.l1:
                self._raise_l1(entry, name, event.time, verdict.cause)
        return verdicts

    def _raise_l1(self, entry: JudgedResponse, preset: str, now: float, cause: str) -> None:
        evidence = self._route(entry.started.route)
        if preset in entry.l1:
            if preset == self.preset and preset in self._raw:
                evidence.keep_live(now)
            return
        entry.l1.add(preset)
        request_id = entry.started.request_id
        self._metrics.l1_events.labels(evidence.name, preset).inc()
        self.events.append(
            {
                "time": rfc3339(now),
                "preset": preset,
                "route": evidence.name,
                "requestId": request_id,
                "cause": cause,
            }
        )
        if preset == self.preset:
            evidence.add_l1(request_id, now)
            if self._on_l1 is not None:
                self._on_l1(request_id, f"L1 {cause}")
            self._check(evidence, now)

    def _check(self, evidence: RouteEvidence, now: float) -> None:
        evidence.traffic_changed = self.traffic.changed
        self._pager.check(evidence, now, self._interruption_rate(evidence.name))

    def _on_transition(self, transition: Transition) -> None:
        if transition.after == "closed" and transition.route in self._routes:
            self._pager.breaker_closed(self._routes[transition.route], self._clock())

    def _interruption_rate(self, route: str) -> float:
        if self._baseline is None or self._mismatch:
            return self._rules.interruptions.floor
        return self._baseline.interruption_rate(route, self._rules)

    def _route(self, name: str) -> RouteEvidence:
        if name not in self._routes and len(self._routes) >= MAX_ROUTES:
            name = _OVERFLOW_ROUTE
        if name not in self._routes:
            self._routes[name] = RouteEvidence(name, self._rules, self._rules.preset(self.preset))
        return self._routes[name]

    def _blind(self, e: RouteEvidence) -> str | None:
        if self._mismatch:
            return self._mismatch
        if e.unscored >= _BLIND_AFTER:
            return (
                f"the last {e.unscored} responses had no signals, lost some on the way, or had a temperature "
                "that was not calibrated (`quaver calibrate --temperature`)"
            )
        return None

    def _export(self, e: RouteEvidence, now: float) -> None:
        self._metrics.export(
            e.name,
            live=e.is_live(now),
            logs=e.logs(),
            alerts=[(rule.name, rule.level, self._pager.firing(rule, e.name)) for rule in self._pager.rules],
            blind=self._blind(e) is not None,
            breaker=STATE_NUMBER[self._breaker.state(e.name)],
        )
