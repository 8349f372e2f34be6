"""OTLP export of spans and metrics. Nothing here blocks or breaks the server.

Metrics are the Prometheus registry's own families, turned into OTLP data points: one source of
truth, two ways out.
"""

from __future__ import annotations

import importlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricExporter,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric as Family
from prometheus_client.samples import Sample

from telemetry import names
from telemetry.settings import TelemetrySettings

log = logging.getLogger(__name__)

SCOPE = "quaver"


def span_exporter(settings: TelemetrySettings) -> SpanExporter:
    """Return the OTLP span exporter of the configured protocol and endpoint."""
    exporter: SpanExporter = _exporter(settings, "trace", "OTLPSpanExporter")
    return exporter


def metric_exporter(settings: TelemetrySettings) -> MetricExporter:
    """Return the OTLP metric exporter of the configured protocol and endpoint."""
    exporter: MetricExporter = _exporter(settings, "metric", "OTLPMetricExporter")
    return exporter


def _exporter(settings: TelemetrySettings, kind: str, name: str) -> Any:
    endpoint = (settings.otlp_endpoint or "").rstrip("/")
    transport = "http" if settings.otlp_protocol == "http/protobuf" else "grpc"
    module = importlib.import_module(f"opentelemetry.exporter.otlp.proto.{transport}.{kind}_exporter")
    if transport == "http":
        path = "traces" if kind == "trace" else "metrics"
        return getattr(module, name)(endpoint=f"{endpoint}/v1/{path}", timeout=settings.otlp_timeout_s)
    plain = not endpoint.startswith("https://")
    return getattr(module, name)(endpoint=endpoint, insecure=plain, timeout=settings.otlp_timeout_s)


class CountedExporter(SpanExporter):
    """Counts the spans another exporter could not deliver."""

    def __init__(self, inner: SpanExporter, drop: Callable[[str, int], None]) -> None:
        self.inner, self._drop = inner, drop

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Export, and count on failure."""
        result = self.inner.export(spans)
        if result is not SpanExportResult.SUCCESS:
            self._drop("spans", len(spans))
        return result

    def shutdown(self) -> None:
        """Shut the inner exporter down."""
        self.inner.shutdown()


class MetricsExport:
    """A thread that exports the registry every `interval_s`, and once more at the end."""

    def __init__(
        self,
        registry: CollectorRegistry,
        exporter: MetricExporter,
        resource: Resource,
        interval_s: float,
        drop: Callable[[str, int], None],
    ) -> None:
        self._registry, self._exporter, self._resource = registry, exporter, resource
        self._interval_s, self._drop = interval_s, drop
        self._started_ns = time.time_ns()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="quaver-otlp-metrics", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float) -> bool:
        """Export a last time. False when that took longer than `timeout_s`."""
        self._stop.set()
        self._thread.join(timeout_s)
        self._exporter.shutdown()
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            self._export()
        self._export()

    def _export(self) -> None:
        try:
            data = metrics_data(self._registry, self._resource, self._started_ns, time.time_ns())
            delivered = self._exporter.export(data) is MetricExportResult.SUCCESS
        except Exception:
            log.exception("OTLP: metrics could not be exported")
            delivered = False
        if not delivered:
            self._drop("metrics", 1)


def metrics_data(registry: CollectorRegistry, resource: Resource, start_ns: int, now_ns: int) -> MetricsData:
    """Turn every family of a registry into cumulative OTLP data points."""
    metrics = [
        metric for family in registry.collect() if (metric := _metric(family, start_ns, now_ns)) is not None
    ]
    scope = ScopeMetrics(InstrumentationScope(SCOPE), metrics, "")
    return MetricsData([ResourceMetrics(resource, [scope], "")])


def _metric(family: Family, start_ns: int, now_ns: int) -> Metric | None:
    spec = names.BY_NAME.get(family.name)
    name = spec.otel if spec else family.name
    unit = spec.unit if spec else family.unit
    samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
    if family.type == "histogram":
        points = _histogram_points(samples, start_ns, now_ns)
        data: Any = Histogram(points, AggregationTemporality.CUMULATIVE)
    else:
        points = [NumberDataPoint(_attributes(s.labels), start_ns, now_ns, s.value) for s in samples]
        counter = family.type == "counter"
        data = Sum(points, AggregationTemporality.CUMULATIVE, True) if counter else Gauge(points)
    return Metric(name, family.documentation, unit, data) if points else None


def _histogram_points(samples: Sequence[Sample], start_ns: int, now_ns: int) -> list[Any]:
    groups: dict[tuple[tuple[str, str], ...], list[Sample]] = {}
    for sample in samples:
        key = tuple(sorted((k, v) for k, v in sample.labels.items() if k != "le"))
        groups.setdefault(key, []).append(sample)
    points = []
    for key, group in groups.items():
        buckets = [(float(s.labels["le"]), int(s.value)) for s in group if s.name.endswith("_bucket")]
        counts = [
            count - below for (_, count), (_, below) in zip(buckets, [(0.0, 0), *buckets], strict=False)
        ]
        total = next((s.value for s in group if s.name.endswith("_sum")), 0.0)
        bounds = [bound for bound, _ in buckets[:-1]]
        point: Any = HistogramDataPoint  # its optional minimum and maximum are typed as required
        labels = _attributes(dict(key))
        points.append(point(labels, start_ns, now_ns, sum(counts), total, counts, bounds, None, None))
    return points


def _attributes(labels: dict[str, str]) -> dict[str, str]:
    return {names.OTEL_LABELS.get(key, key): value for key, value in labels.items()}
