from __future__ import annotations

from collections.abc import Callable

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from telemetry.hub import Telemetry
from telemetry.names import TIERS

from .conftest import START, Events

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


def exported(telemetry: Telemetry, exporter: InMemorySpanExporter) -> list[ReadableSpan]:
    telemetry.close()
    return list(exporter.get_finished_spans())


def by_name(spans: list[ReadableSpan]) -> dict[str, ReadableSpan]:
    assert len({span.name for span in spans}) == len(spans)
    return {span.name: span for span in spans}


def test_a_request_is_one_trace(
    make: Callable[..., Telemetry], events: Events, exporter: InMemorySpanExporter
) -> None:
    telemetry = make(span_exporter=exporter)
    meta = {"trace_id": f"00-{TRACE}-{PARENT}-01", "headers": {"x-quaver-step": "41"}}
    events.run(telemetry, meta=meta)
    spans = by_name(exported(telemetry, exporter))
    assert spans.keys() == {"chat tiny", "llm.prompt.encode", "llm.completion.generate"}
    server, encode, generate = (
        spans["chat tiny"],
        spans["llm.prompt.encode"],
        spans["llm.completion.generate"],
    )
    assert {f"{span.context.trace_id:032x}" for span in spans.values()} == {TRACE}
    assert server.parent is not None
    assert f"{server.parent.span_id:016x}" == PARENT
    assert encode.parent is not None and encode.parent.span_id == server.context.span_id
    assert generate.parent is not None and generate.parent.span_id == server.context.span_id
    attributes = dict(server.attributes or {})
    assert attributes == attributes | {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "quaver",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 3,
        "llm.request.type": "chat",
        "llm.prompt.tokens": 7,
        "llm.completion.tokens": 3,
        "llm.kv_cache.hit_ratio": 4 / 7,
        "llm.token.latency": pytest.approx(0.2),
        "llm.decode.step.length": 3,
        "quaver.upstream.step": 41,
        "quaver.aggregate.mean_confidence": 0.6,
    }
    assert dict(encode.attributes or {})["llm.prompt.length"] == 7
    assert dict(encode.attributes or {})["llm.model.id"] == "tiny"
    assert dict(generate.attributes or {})["llm.step.index"] == 3
    assert dict(generate.attributes or {})["llm.kv_cache.size"] == 10
    assert server.start_time == int(START * 1e9)
    assert server.end_time is not None and encode.end_time is not None and generate.start_time is not None
    assert server.start_time <= encode.end_time <= generate.start_time < server.end_time
    assert server.kind is trace.SpanKind.SERVER


def test_a_wait_for_the_tiers_is_a_span_before_that_of_the_prompt(
    make: Callable[..., Telemetry], events: Events, exporter: InMemorySpanExporter
) -> None:
    telemetry = make(span_exporter=exporter)
    events.run(telemetry, tier_tokens={"device": 2, "disk": 2}, loading_s=0.05)
    spans = by_name(exported(telemetry, exporter))
    load, encode = spans["quaver.kv_cache.load"], spans["llm.prompt.encode"]
    assert load.parent is not None and load.parent.span_id == spans["chat tiny"].context.span_id
    assert load.start_time == int((START + 0.01) * 1e9)
    assert load.end_time == encode.start_time == int((START + 0.06) * 1e9)
    tokens = {f"quaver.kv_cache.tokens.{tier}": count for tier, count in zip(TIERS, (2, 0, 2), strict=True)}
    for span in (load, spans["chat tiny"]):
        assert dict(span.attributes or {}).items() >= tokens.items()


@pytest.mark.parametrize(
    ("trace_id", "keeps"), [(TRACE, True), ("garbage", False), ("0" * 32, False), (None, False)]
)
def test_a_bare_trace_id_and_garbage(
    make: Callable[..., Telemetry],
    events: Events,
    exporter: InMemorySpanExporter,
    trace_id: str | None,
    keeps: bool,
) -> None:
    telemetry = make(span_exporter=exporter)
    events.run(telemetry, meta={"trace_id": trace_id})
    ids = {f"{span.context.trace_id:032x}" for span in exported(telemetry, exporter)}
    assert len(ids) == 1
    assert (ids == {TRACE}) == keeps
    assert ids != {"0" * 32}


def test_an_aborted_request_has_a_span_with_its_status(
    make: Callable[..., Telemetry], events: Events, exporter: InMemorySpanExporter
) -> None:
    telemetry = make(span_exporter=exporter)
    meta = events.run(telemetry, reason="abort", disconnected=True)
    telemetry.on_ended(events.ended(meta, reason="abort"))
    waiting = events.meta("r2")  # never got a token
    telemetry.on_started(events.started(waiting))
    telemetry.on_ended(
        events.ended(waiting, reason="error", error="the model process was lost", first_token_s=None)
    )
    left = events.meta("r3")  # open while the server stops
    telemetry.on_started(events.started(left))
    servers = [span for span in exported(telemetry, exporter) if span.name == "chat tiny"]
    told = {dict(s.attributes or {})["quaver.request.id"]: s.status for s in servers}
    assert len(servers) == 3
    assert {key: status.status_code for key, status in told.items()} == dict.fromkeys(told, StatusCode.ERROR)
    assert told["r1"].description == "client disconnected"
    assert told["r2"].description == "the model process was lost"
    assert told["r3"].description == "the server stopped"
    assert trace.get_current_span() is trace.INVALID_SPAN


def test_long_spans_are_kept_whatever_was_sampled(
    make: Callable[..., Telemetry], events: Events, exporter: InMemorySpanExporter
) -> None:
    telemetry = make(span_exporter=exporter, trace_ratio=0.0)
    not_sampled = {"trace_id": f"00-{TRACE}-{PARENT}-00"}
    for meta in ({}, not_sampled):
        events.run(telemetry, "short", meta=meta, completion_tokens=1000)
        events.run(telemetry, "long", meta=meta, completion_tokens=1001)
    events.run(telemetry, "asked", meta={"trace_id": f"00-{TRACE}-{PARENT}-01"})
    spans = exported(telemetry, exporter)
    ids = [dict(s.attributes or {})["quaver.request.id"] for s in spans if s.name == "chat tiny"]
    assert ids == ["long", "long", "asked"]
    assert len(spans) == 9  # children too
    assert all(span.context.trace_flags.sampled for span in spans)


def test_choices_alerts_faults_and_annotations(telemetry: Telemetry, events: Events) -> None:
    meta = events.meta("r1")
    telemetry.on_started(events.started(meta, choices=2, faults=["f0"]))
    telemetry.on_step(events.step([("r1", 0), ("r1", 1)], 0, touched={"r1": ["f1", "f0"]}))
    telemetry.alert_raised("r1", "L1LowConfidence")
    telemetry.annotate("r1", "experiment", "noise-2")
    telemetry.on_ended(events.ended(meta, faults=["f1"]))
    server, _, *generated = telemetry.spans.recent("r1")
    assert [span["attributes"]["quaver.choice"] for span in generated] == [0, 1]
    assert server["attributes"]["quaver.faults"] == ["f0", "f1"]
    assert server["attributes"]["quaver.annotation.experiment"] == "noise-2"
    assert {"quaver.alert", "quaver.first_token"} == {event["name"] for event in server["events"]}


def test_only_the_last_traces_are_kept(make: Callable[..., Telemetry], events: Events) -> None:
    telemetry = make(traces_kept=3)
    for number in range(10):
        events.run(telemetry, f"r{number}")
    assert [n for n in range(10) if telemetry.spans.recent(f"r{n}")] == [7, 8, 9]


def test_the_step_travels_downstream(telemetry: Telemetry, events: Events) -> None:
    meta = events.meta("r1", trace_id=f"00-{TRACE}-{PARENT}-01")
    telemetry.on_started(events.started(meta))
    assert "x-quaver-step" not in telemetry.downstream_headers("r1")
    telemetry.on_step(events.step([("r1", 0)], 0))
    headers = telemetry.downstream_headers("r1")
    assert headers["x-quaver-step"] == "1"
    telemetry.on_ended(events.ended(meta))
    server = telemetry.spans.recent("r1")[0]
    assert headers["traceparent"] == f"00-{TRACE}-{server['span_id']}-01"
    assert telemetry.downstream_headers("r1") == {}
