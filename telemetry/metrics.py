"""The one metric registry: single process, so that exemplars work.

Metric objects are declared in `telemetry.names`; other packages add theirs to `registry`.
"""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Callable, Iterable, Sequence
from typing import get_args

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from engine.admission import Levels
from engine.hooks import RequestEnded
from engine.messages import TOKEN_SIGNALS, DetailReason, Ready, StepOutput
from telemetry import names
from telemetry.histograms import BatchHistogram
from telemetry.joint import PERIODS, Joint
from telemetry.labels import Labels
from telemetry.open_requests import OpenRequest
from telemetry.tiers import Growth, KvTiers

_JOINT_METRICS = {
    "mean_confidence": names.MEAN_CONFIDENCE,
    "response_entropy": names.RESPONSE_ENTROPY,
    "interruption_rate": names.INTERRUPTION_RATE,
}
#: By the field of EngineStats that counts since the model process began.
_PREFIX_METRICS = {
    "prefix_hits": names.PREFIX_HITS,
    "prefix_misses": names.PREFIX_MISSES,
    "prefix_evictions": names.PREFIX_EVICTIONS,
    "prefix_collisions": names.PREFIX_COLLISIONS,
}


class JointCollector(Collector):
    """Joint inputs as gauges. A blind input has no value sample; its age and `blind` show why."""

    def __init__(self, joint: Joint, routes: Labels, clock: Callable[[], float]) -> None:
        self.joint, self.routes, self.clock = joint, routes, clock

    def describe(self) -> Iterable[Metric]:
        """Name the families without reading them."""
        specs = (*_JOINT_METRICS.values(), names.JOINT_BLIND, names.JOINT_AGE)
        return [GaugeMetricFamily(spec.name, spec.help, labels=spec.labels) for spec in specs]

    def collect(self) -> Iterable[Metric]:
        """Yield the value, age and blindness of each input, by route and for `all`."""
        now = self.clock()
        self.joint.advance(now)
        families = {spec.name: spec for spec in self.describe()}
        rows = [(names.ALL, -1), *((name, row) for row, name in enumerate(list(self.routes.names)))]
        for key in PERIODS:
            for name, row in rows:
                reading = self.joint.read(key, now, row)
                if reading.value is None and row >= 0:
                    continue  # a route that never spoke
                _add(families[names.JOINT_BLIND.name], [key, name], float(reading.blind))
                if reading.age_s is not None:
                    _add(families[names.JOINT_AGE.name], [key, name], reading.age_s)
                if reading.value is not None and not reading.blind:
                    _add(families[_JOINT_METRICS[key].name], [name], reading.value)
        return families.values()


class Metrics:
    """Every metric of this package, on `registry`."""

    def __init__(self, joint: Joint, routes: Labels, tenants: Labels, clock: Callable[[], float]) -> None:
        self.registry = CollectorRegistry()
        self.routes, self.tenants = routes, tenants
        self.models, self.alert_names, self.codes = Labels(8), Labels(32), Labels(32)
        self.token_histograms = {
            TOKEN_SIGNALS.index(signal): BatchHistogram(spec, routes)
            for signal, spec in (
                ("confidence", names.TOKEN_CONFIDENCE),
                ("entropy", names.TOKEN_ENTROPY),
                ("surprisal", names.TOKEN_SURPRISAL),
                ("margin", names.TOKEN_MARGIN),
            )
        }
        for collector in (*self.token_histograms.values(), JointCollector(joint, routes, clock)):
            self.registry.register(collector)
        self.latency = self._histogram(names.INFERENCE_LATENCY)
        self.duration = self._histogram(names.REQUEST_DURATION)
        self.first_token = self._histogram(names.TIME_TO_FIRST_TOKEN)
        self.per_token = self._histogram(names.TIME_PER_OUTPUT_TOKEN)
        self.step_duration = self._histogram(names.STEP_DURATION)
        self.detail_seconds = self._counter(names.DETAIL_SECONDS)
        detail_tokens = self._counter(names.DETAIL_TOKENS)
        self._detail_counters = {reason: detail_tokens.labels(reason) for reason in get_args(DetailReason)}
        self.tokens = self._counter(names.TOKENS)
        self.tenant_requests = self._counter(names.TENANT_REQUESTS)
        self.responses = self._counter(names.RESPONSES)
        self.interruptions = self._counter(names.INTERRUPTIONS)
        self.canaries = self._counter(names.CANARIES)
        self.feedback = self._counter(names.FEEDBACK)
        self.alerted = self._counter(names.ALERTED)
        self.dropped = self._counter(names.DROPPED)
        self.sink_errors = self._counter(names.SINK_ERRORS)
        self.restarts = self._counter(names.ENGINE_RESTARTS)
        pages = self._gauge(names.KV_PAGES)
        self._pages_used, self._pages_free = pages.labels("used"), pages.labels("free")
        self._pages_cached = pages.labels("cached")
        self._prefix = {field: self._counter(spec) for field, spec in _PREFIX_METRICS.items()}
        self._growth = Growth()
        self.kv = KvTiers(clock())
        self.registry.register(self.kv)
        self.kv_wait = self._histogram(names.KV_WAIT)
        self.queue_depth = self._gauge(names.QUEUE_DEPTH)
        self.running = self._gauge(names.RUNNING)
        self.admission = [
            self._gauge(spec)
            for spec in (
                names.ADMISSION_POOL,
                names.ADMISSION_IN_FLIGHT,
                names.PREDICTED_QPS,
                names.QUEUE_DELAY,
            )
        ]
        self.open_requests = self._gauge(names.OPEN_REQUESTS)
        self.engine_up = self._gauge(names.ENGINE_UP)
        self.engine_info = self._gauge(names.ENGINE_INFO)
        for what in ("tokens", "layers", "requests", "spans", "metrics", "late_alerts"):
            self.dropped.labels(what)
        self._token_counters: list[Counter] = []

    def observe_tokens(
        self, route: NDArray[np.intp], signals: NDArray[np.float64], traces: NDArray[np.object_], time: float
    ) -> None:
        """Count tokens until `time`: route index [rows], signals [rows, signals], trace ids [rows]."""
        for column, histogram in self.token_histograms.items():
            histogram.observe(route, signals[:, column], traces, time)
        for row, count in enumerate(np.bincount(route).tolist()):
            if count:
                self._completion_counter(row).inc(count)

    def observe_engine(self, outputs: Sequence[StepOutput]) -> None:
        """Count what engine steps took and sampled, and set the levels that the last one left behind."""
        for output in outputs:
            if output.duration_s:
                self.step_duration.observe(output.duration_s)
        self.detail_seconds.inc(sum(output.detail_s for output in outputs))
        reasons = Counts(reason for output in outputs for reason in output.detail_reasons)
        for reason, count in reasons.items():
            self._detail_counters[reason].inc(count)
        stats = outputs[-1].stats
        self.running.set(stats.running)
        self.queue_depth.set(stats.waiting)
        self._pages_used.set(stats.pages_used)
        self._pages_cached.set(stats.pages_cached)
        self._pages_free.set(stats.pages_total - stats.pages_used - stats.pages_cached)
        for field, counter in self._prefix.items():
            counter.inc(self._growth.of(field, getattr(stats, field)))
        self.kv.observe(outputs)
        for finish in (finish for output in outputs for finish in output.finished):
            if finish.loading_s:
                self.kv_wait.observe(finish.loading_s)

    def observe_admission(self, levels: Levels) -> None:
        """Set what the door knows now."""
        for gauge, level in zip(self.admission, levels, strict=True):
            gauge.set(level)

    def observe_request(
        self, request: OpenRequest, ended: RequestEnded, outcome: str, quantization: str
    ) -> None:
        """Count a request that ended. Canaries are counted apart and touch no other figure."""
        if request.started.meta.canary:
            self.canaries.labels(request.route, outcome).inc()
            return
        model = self.models.name(request.started.model)
        who = (names.OPERATIONS[request.started.endpoint], names.PROVIDER, model)
        failed = ended.reason in ("abort", "error", "shed")
        exemplar = {"trace_id": request.trace}
        self.latency.labels(model, quantization).observe(ended.duration_s, exemplar)
        self.duration.labels(*who, ended.reason if failed else "").observe(ended.duration_s, exemplar)
        if ended.first_token_s is not None:
            self.first_token.labels(*who).observe(ended.first_token_s, exemplar)
        if ended.token_times_s:
            mean = sum(ended.token_times_s) / len(ended.token_times_s)
            self.per_token.labels(*who).observe(mean, exemplar)
        self.responses.labels(request.route, outcome, ended.reason).inc()
        self.tenant_requests.labels(request.tenant, outcome).inc()
        if outcome == "interrupted":
            self.interruptions.labels(request.route).inc()

    def observe_rejection(self, route: str, tenant: str, code: str, canary: bool) -> None:
        """Count a request that was turned away, by the code of its error."""
        if canary:
            self.canaries.labels(route, "rejected").inc()
            return
        self.responses.labels(route, "rejected", self.codes.name(code)).inc()
        self.tenant_requests.labels(tenant, "rejected").inc()

    def set_engine(self, ready: Ready) -> None:
        """Show which model runs, and on what."""
        self.engine_info.clear()
        self.engine_info.labels(ready.model, ready.quantization, ready.dtype, ready.backend).set(1)
        self._growth.restart()
        self.kv.begin(ready)
        self._pages_used.set(0)
        self._pages_cached.set(0)
        self._pages_free.set(ready.kv_pages)

    def drop(self, what: str, count: int = 1) -> None:
        """Count telemetry that was lost."""
        self.dropped.labels(what).inc(count)

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """Return body and content type for an `Accept` header; OpenMetrics carries the exemplars."""
        encoder, content_type = choose_encoder(accept)
        return encoder(self.registry), content_type

    def _completion_counter(self, row: int) -> Counter:
        while len(self._token_counters) <= row:
            name = self.routes.names[len(self._token_counters)]
            self._token_counters.append(self.tokens.labels(name, "completion"))
        return self._token_counters[row]

    def _counter(self, spec: names.Metric) -> Counter:
        return Counter(spec.name, spec.help, spec.labels, registry=self.registry)

    def _gauge(self, spec: names.Metric) -> Gauge:
        return Gauge(spec.name, spec.help, spec.labels, registry=self.registry)

    def _histogram(self, spec: names.Metric) -> Histogram:
        return Histogram(spec.name, spec.help, spec.labels, registry=self.registry, buckets=spec.buckets)


def _add(family: Metric, labels: list[str], value: float) -> None:
    assert isinstance(family, GaugeMetricFamily)
    family.add_metric(labels, value)
