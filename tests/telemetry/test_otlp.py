from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from telemetry.hub import Telemetry
from tests.quaver.server import wait_for

from .conftest import Events

HANGS_S = 30.0  # far beyond the timeouts below, so that a slow machine is not taken for a hang


class Collector(ThreadingHTTPServer):
    """Receives OTLP over HTTP and parses it."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.traces: list[ExportTraceServiceRequest] = []
        self.metrics: list[ExportMetricsServiceRequest] = []


class Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.path == "/v1/traces":
            self.server.traces.append(ExportTraceServiceRequest.FromString(body))
        if self.path == "/v1/metrics":
            self.server.metrics.append(ExportMetricsServiceRequest.FromString(body))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def collector() -> Iterator[Collector]:
    server = Collector()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def test_traces_and_metrics_arrive(
    collector: Collector, make: Callable[..., Telemetry], events: Events
) -> None:
    telemetry = make(otlp_endpoint=f"http://127.0.0.1:{collector.server_port}")
    for number in range(5):
        events.run(telemetry, f"r{number}", meta={"route": "qa"})
    telemetry.close()
    spans = [
        span
        for request in collector.traces
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    assert sum(span.name == "chat tiny" for span in spans) == 5
    assert len(spans) == 15
    assert len({span.span_id for span in spans}) == 15
    metrics = {m.name: m for m in collector.metrics[-1].resource_metrics[0].scope_metrics[0].metrics}
    latency = metrics["llm.inference.latency"].histogram.data_points[0]
    assert latency.count == 5
    assert latency.sum == pytest.approx(2.5)
    assert list(latency.explicit_bounds) == pytest.approx([0.1 * 2**k for k in range(10)])
    assert list(latency.bucket_counts) == [0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0]
    assert not latency.HasField("min")
    duration = metrics["gen_ai.server.request.duration"]
    assert duration.unit == "s"
    keys = {a.key for a in duration.histogram.data_points[0].attributes}
    assert keys == {"gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model", "error.type"}
    tokens = metrics["quaver.tokens"].sum
    assert tokens.is_monotonic
    counted = {
        tuple(sorted(a.value.string_value for a in point.attributes)): point.as_double
        for point in tokens.data_points
    }
    assert counted == {("completion", "qa"): 15, ("prompt", "qa"): 35, ("completion", "other"): 0}
    assert metrics["quaver.kv_pages"].gauge.data_points


def test_a_dead_collector_costs_nothing_but_counts(make: Callable[..., Telemetry], events: Events) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    telemetry = make(otlp_endpoint=f"http://127.0.0.1:{port}", otlp_timeout_s=0.5)
    events.run(telemetry)
    telemetry.close()

    def lost(what: str) -> float:
        return telemetry.registry.get_sample_value("quaver_telemetry_dropped_total", {"what": what}) or 0.0

    # Exports that outlast the shutdown are counted when they give up.
    wait_for(lambda: lost("spans") and lost("metrics"), 60)
    assert lost("spans") == 3


def test_a_collector_that_never_answers_does_not_hold_the_shutdown(
    make: Callable[..., Telemetry], events: Events
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        telemetry = make(otlp_endpoint=f"http://127.0.0.1:{server.getsockname()[1]}", otlp_timeout_s=0.5)
        events.run(telemetry)
        began = time.perf_counter()
        telemetry.close()
        assert time.perf_counter() - began < HANGS_S


def test_nothing_is_exported_without_an_endpoint(make: Callable[..., Telemetry], events: Events) -> None:
    before = set(threading.enumerate())  # a thread of another test may be about to end
    events.run(make())
    names = {thread.name for thread in set(threading.enumerate()) - before}
    assert not [name for name in names if name.startswith(("Otel", "quaver-otlp"))]


def test_grpc_exporters_can_be_made(make: Callable[..., Telemetry], events: Events) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    telemetry = make(otlp_endpoint=f"http://127.0.0.1:{port}", otlp_protocol="grpc", otlp_timeout_s=0.3)
    events.run(telemetry)
    began = time.perf_counter()
    telemetry.close()
    assert time.perf_counter() - began < HANGS_S
