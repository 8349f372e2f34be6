"""The facade: hears the engine, keeps the books, and tells the signal sinks.

Every method runs on the front's event loop and returns at once: files and exports have threads of
their own. Sinks see signals and business events, never faults or annotations.

Engine steps are only kept as they come, and taken in together: when their window of 100 ms is over, or
before anybody looks at what they change.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import numpy as np
from opentelemetry.sdk.metrics.export import MetricExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.export import SpanExporter

from engine.admission import Levels
from engine.hooks import ChoiceText, DetailHook, RequestEnded, RequestStarted
from engine.messages import TOKEN_SIGNALS, Ready, RequestMeta, StepOutput
from telemetry import columns, otlp, rows
from telemetry.business import Asked, Business, Feedback, outcome_of
from telemetry.encoder import Encoder
from telemetry.joint import Joint
from telemetry.labels import Labels
from telemetry.live import Live
from telemetry.metrics import Metrics
from telemetry.open_requests import OpenChoice, OpenRequest, OpenRequests
from telemetry.propagation import headers_for, parent_of
from telemetry.records import Records
from telemetry.settings import TelemetrySettings
from telemetry.signals import BusinessEvent, BusinessKind, SignalSink
from telemetry.sinks import Sinks
from telemetry.spans import Spans

if TYPE_CHECKING:
    from starlette.routing import Route

log = logging.getLogger(__name__)

_CONFIDENCE, _ENTROPY = TOKEN_SIGNALS.index("confidence"), TOKEN_SIGNALS.index("entropy")
_TICK_S = 0.1
Method = TypeVar("Method", bound=Callable[..., None])


def _timed(method: Method) -> Method:
    """Count the processor time of a method, what it calls included: a nested call is not counted again."""

    @functools.wraps(method)
    def timed(self: Telemetry, *arguments: Any) -> None:
        spent, began = self._spent_s, time.thread_time()
        try:
            method(self, *arguments)
        finally:
            self._spent_s = spent + time.thread_time() - began

    return cast("Method", timed)


class Telemetry:
    """Implements `engine.hooks.Observer`. `token_bytes` gives the bytes of a token id, for captured
    content; exporters default to OTLP where an endpoint is configured.
    """

    def __init__(
        self,
        settings: TelemetrySettings,
        token_bytes: Callable[[int], bytes] | None = None,
        *,
        clock: Callable[[], float] = time.time,
        span_exporter: SpanExporter | None = None,
        metric_exporter: MetricExporter | None = None,
    ) -> None:
        self.settings, self.clock, self.token_bytes = settings, clock, token_bytes
        self._routes, self._tenants = Labels(settings.max_routes), Labels(settings.max_tenants)
        self._open = OpenRequests()
        self.joint = Joint(
            settings.max_routes + 1,
            self._open.running,
            settings.interruption_window_s,
            settings.blind_after_s,
        )
        self.metrics = Metrics(self.joint, self._routes, self._tenants, clock)
        self.registry = self.metrics.registry
        self.live = Live()
        self.business = Business(settings.feedback_kept)
        self.records = Encoder(self._text, self.catch_up)
        self.writer = Records(settings, self.metrics.drop, self._text)
        resource = Resource.create({"service.name": "quaver"})
        configured = settings.otlp_endpoint is not None
        if span_exporter is None and configured:
            span_exporter = otlp.span_exporter(settings)
        if metric_exporter is None and configured:
            metric_exporter = otlp.metric_exporter(settings)
        self.spans = Spans(settings, resource, self.metrics.drop, span_exporter)
        self._export: otlp.MetricsExport | None = None
        if metric_exporter is not None:
            self._export = otlp.MetricsExport(
                self.registry, metric_exporter, resource, settings.otlp_interval_s, self.metrics.drop
            )
        self._sinks = Sinks(lambda sink: self.metrics.sink_errors.labels(sink).inc())
        self.detail_hook: DetailHook | None = None
        self._waiting: list[StepOutput] = []  # of one joint window
        self._spent_s = 0.0
        self._model, self._quantization = "unknown", "unknown"
        self._ticker: asyncio.Task[None] | None = None
        self._levels: Callable[[], Levels] | None = None

    # --- composition ---

    def add_sink(self, sink: SignalSink) -> None:
        """Let a detector hear signals and business events from now on."""
        self._sinks.add(sink)

    def watch_admission(self, levels: Callable[[], Levels]) -> None:
        """Show the levels of the door, read ten times a second on the event loop."""
        self._levels = levels

    def routes(self) -> list[Route]:
        """Return the HTTP routes of this package."""
        from telemetry.routes import routes  # noqa: PLC0415 - routes name this class

        return routes(self)

    def start(self) -> None:
        """Keep the joint windows turning without traffic too. Needs a running event loop."""
        self._ticker = asyncio.get_running_loop().create_task(self._tick_forever())

    def close(self) -> None:
        """End what is open, write and export everything queued, within the deadlines. Harmless twice."""
        if self._ticker is not None:
            self._ticker.cancel()
            self._ticker = None
        self.catch_up()
        for request in self._open:
            self.on_ended(rows.stopped(request, self.clock()))
        self.writer.close()
        if not self.spans.close():
            log.warning("OTLP: the last spans were not delivered within %.0f s", self.settings.otlp_timeout_s)
        if self._export is not None:
            self._export.close(self.settings.otlp_timeout_s)
            self._export = None

    def engine_ready(self, ready: Ready) -> None:
        """Learn which model runs, after what the one before it has left."""
        self.catch_up()
        self._model, self._quantization = ready.model, ready.quantization
        self.metrics.set_engine(ready)

    # --- engine.hooks.Observer ---

    @_timed
    def on_started(self, event: RequestStarted) -> None:
        """A request was admitted: draw its ids, make room for its sums."""
        meta = event.meta
        route = self._routes.index(meta.route)
        parent, trace_id, upstream = parent_of(meta.trace_id, meta.headers)
        request = OpenRequest(
            started=event,
            route=self._routes.names[route],
            route_index=route,
            tenant=self._tenants.name(meta.tenant),
            parent=parent,
            trace_id=trace_id,
            span_id=self.spans.ids.generate_span_id(),
            upstream_step=upstream,
            faults=list(event.faults),
        )
        self._open.add(request)
        self.records.open(meta.request_id, event.choices)
        self.business.open(meta.request_id, Asked(meta.tenant, request.route, meta.canary))
        self.metrics.tokens.labels(request.route, "prompt").inc(event.prompt_tokens)
        self.metrics.open_requests.set(len(self._open))
        self._sinks.tell("on_started", rows.started(event, request.route))

    def on_step(self, output: StepOutput) -> None:
        """Keep an engine step. `benchmarks/telemetry.py` says what its part of `catch_up` costs."""
        if self.joint.over(output.time):
            self.tick(output.time)
        self._waiting.append(output)

    @_timed
    def catch_up(self) -> None:
        """Take in the steps that wait."""
        outputs, self._waiting = self._waiting, []
        if not outputs:
            return
        self.metrics.observe_engine(outputs)
        if any(output.duration_s for output in outputs):
            self.live.step(outputs[-1].time, outputs[-1].stats)
        for output in outputs:
            for request_id, faults in output.touched.items():
                request = self._open.find(request_id)
                if request is not None:
                    request.touch(faults)
        self._take([self._left(columns.decode(o, self.settings.capture_content)) for o in outputs])
        for finish in (finish for output in outputs for finish in output.finished):
            self.live.finished(outputs[-1].time, finish)
            choice = self._open.choice(finish.request_id, finish.choice)
            if choice is not None:
                choice.finish = finish

    def _left(self, step: columns.Step) -> columns.Step:
        """Return what faults leave of a step's detail; what they drop is counted."""
        hook = self.detail_hook
        if hook is None or not hook.active or not step.request_ids:
            return step
        found = [self._open.find(request_id) for request_id in step.request_ids]
        metas = [None if request is None else request.started.meta for request in found]
        rows, layers = hook.lost(metas, step.choices, step.steps)
        bare = [row for row in step.detail_rows if row in rows or row in layers]
        for what, gone in (("tokens", rows), ("layers", bare)):
            if gone:
                self.metrics.drop(what, len(gone))
            for row in gone:
                if (request := found[row]) is not None:
                    request.lost[what] += 1
                self._sinks.tell("on_lost", step.request_ids[row], step.choices[row], what)
        kept = [row for row in range(len(metas)) if row not in rows]
        return columns.keep(step, kept, without_layers=layers)

    def on_text(self, event: ChoiceText) -> None:
        """Look for the end of the first sentence."""
        choice = self._open.choice(event.meta.request_id, event.choice)
        tokens = choice and choice.sentence.push(event.text, event.tokens)
        if tokens is not None:
            self.catch_up()
            self._sinks.tell("on_sentence", event.meta.request_id, event.choice, tokens)

    @_timed
    def on_ended(self, event: RequestEnded) -> None:
        """Close the books on a request; a second call for the same request does nothing."""
        self.catch_up()
        request_id = event.meta.request_id
        request = self._open.find(request_id)
        if request is None:
            return
        outcome = outcome_of(event.reason, event.disconnected)
        request.touch(event.faults)
        for number, choice in request.choices.items():
            tokens = choice.sentence.finish()
            if tokens is not None:
                self._sinks.tell("on_sentence", request_id, number, tokens)
        self._open.end_choices(request)
        self.metrics.observe_request(request, event, outcome, self._quantization)
        self._sinks.tell("on_ended", rows.ended(event))
        if not request.started.meta.canary:
            broken = outcome == "interrupted"
            self.joint.add_ending(event.time, request.route_index, broken)
            self.live.ended(
                event.time, broken, outcome == "failed", bool(request.alerts), event.first_token_s
            )
            self._sinks.tell("on_business", rows.business(outcome, event.meta, request.route, event.time))
        self._open.remove(request_id)
        self.metrics.open_requests.set(len(self._open))
        self.writer.put_request(
            rows.request(request, event, outcome, self._quantization, self.settings.capture_content)
        )
        self.spans.emit(request, event, outcome)
        self.records.retire(request_id)
        self.tick(event.time)

    def on_rejected(self, meta: RequestMeta, status: int, code: str) -> None:
        """A request was turned away at the door."""
        now = self.clock()
        route = self._routes.name(meta.route)
        self.metrics.observe_rejection(route, self._tenants.name(meta.tenant), code, meta.canary)
        self.writer.put_request(rows.rejected(meta, status, code, self._model, now))
        if not meta.canary:
            self.live.at(now).rejected += 1
            self._sinks.tell("on_business", rows.business("rejected", meta, route, now))

    def on_engine(self, state: Literal["ready", "lost", "restarting", "stopped"]) -> None:
        """The model process came or went."""
        self.catch_up()
        self.metrics.engine_up.set(state == "ready")
        if state == "lost":
            self.metrics.restarts.inc()
        if state != "ready":
            self.metrics.running.set(0)
            self.metrics.queue_depth.set(0)
            self.metrics.kv.end()

    def spent_s(self) -> float:
        """Processor time that signals took so far: on the event loop, detectors included, and to write."""
        return self._spent_s + self.writer.cpu_s()

    # --- what others tell us ---

    def give_feedback(self, feedback: Feedback, tenant: str) -> float | None:
        """Take feedback of a request's owner and return the value that counts.

        Raises LookupError when the request is not known, or not this tenant's.
        """
        found = self.business.give(feedback, tenant)
        if found is None:
            raise LookupError(feedback.request_id)
        asked, value, new = found
        if new and not asked.canary:
            self.metrics.feedback.labels(asked.route, feedback.kind).inc()
            kind: BusinessKind = "feedback" if feedback.kind == "rating" else "task_done"
            amount = value if feedback.kind == "rating" else float(feedback.kind == "completed")
            self.business_event(kind, feedback.request_id, amount)
        return value

    def business_event(self, kind: BusinessKind, request_id: str, value: float | None = None) -> None:
        """Tell the sinks of something that happened to the user of a request; canaries are skipped."""
        asked = self.business.find(request_id)
        if asked is not None and not asked.canary:
            event = BusinessEvent(
                kind=kind,
                request_id=request_id,
                tenant=asked.tenant,
                route=asked.route,
                time=self.clock(),
                value=value,
            )
            self._sinks.tell("on_business", event)

    def alert_raised(self, request_id: str, name: str) -> None:
        """Note an alert against one response; too late for its record, it is only counted."""
        now = self.clock()
        self.metrics.alerted.labels(self.metrics.alert_names.name(name)).inc()
        request = self._open.find(request_id)
        if request is None:
            self.metrics.drop("late_alerts")
        else:
            request.alerts.append((now, name))

    def annotate(self, request_id: str, name: str, value: str | float | bool) -> None:
        """Put an attribute on the span of an open request; detectors never see it."""
        request = self._open.find(request_id)
        if request is not None:
            request.annotations[name] = value

    def downstream_headers(self, request_id: str) -> dict[str, str]:
        """Headers for a call made on behalf of an open request: trace context and step id."""
        self.catch_up()
        request = self._open.find(request_id)
        if request is None:
            return {}
        return headers_for(request.trace_id, request.span_id, request.last_step)

    # --- inside ---

    def _take(self, steps: list[columns.Step]) -> None:
        """Account for the rows whose request is open; rows of ended requests are only recorded."""
        taken: list[columns.Step] = []
        choices: list[OpenChoice] = []
        for step in steps:
            if step.request_ids:
                self.writer.put_step(step)
                emitted, emitting = self._open.emitted(step)
                if emitting:
                    self.records.push(emitted)
                    taken.append(emitted)
                    choices += emitting
        if not taken:
            return
        batch, running = columns.token_batch(taken), self._open.running
        at = np.fromiter((choice.row for choice in choices), np.intp, len(choices))
        signals = batch.signals.astype(np.float64)
        route = running.route[at]
        running.add(at, signals[:, _ENTROPY])
        self.metrics.observe_tokens(route, signals, running.trace[at], batch.time)
        self.joint.add_tokens(route, signals[:, _CONFIDENCE])
        self.live.tokens(batch.time, signals[:, _CONFIDENCE])
        self._sinks.tell("on_tokens", batch)
        for step in taken:
            if step.detail_rows:
                self._sinks.tell("on_layers", columns.layer_batch(step))

    @_timed
    def tick(self, now: float | None = None) -> None:
        """Close the joint windows that are over."""
        self.catch_up()
        now = self.clock() if now is None else now
        self.joint.advance(now)
        self._show_joint(now)

    def _show_joint(self, now: float) -> None:
        self.live.joint(
            now,
            self.joint.read("response_entropy", now).fresh,
            self.joint.read("interruption_rate", now).fresh,
        )

    async def _tick_forever(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            while True:
                await asyncio.sleep(_TICK_S)
                if self.joint.over(self.clock()):
                    self.tick()
                if self._levels is not None:
                    self.metrics.observe_admission(self._levels())

    def _text(self, token: int) -> str | None:
        return None if self.token_bytes is None else self.token_bytes(token).decode("utf-8", "replace")
