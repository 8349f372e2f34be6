from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from engine.admission import Door
from engine.messages import EngineStats, Ready, RequestMeta
from telemetry import names
from telemetry.histograms import BatchHistogram
from telemetry.hub import Telemetry
from telemetry.labels import Labels

from .conftest import Events

OPENMETRICS = "application/openmetrics-text; version=1.0.0"


def sample(telemetry: Telemetry, name: str, **labels: str) -> float | None:
    return telemetry.registry.get_sample_value(name, labels)


def test_latency_histogram_is_exactly_as_named(telemetry: Telemetry, events: Events) -> None:
    events.run(telemetry)
    text, content_type = telemetry.metrics.exposition("text/plain")
    assert content_type.startswith("text/plain")
    families = {family.name: family for family in parse_text(text.decode())}
    buckets = [s for s in families["llm_inference_latency_seconds"].samples if s.name.endswith("_bucket")]
    bounds = [float(s.labels["le"]) for s in buckets]
    np.testing.assert_allclose(bounds[:-1], [0.1 * 2**k for k in range(10)])
    assert bounds[-1] == float("inf")
    assert all(set(s.labels) == {"model_name", "quantization", "le"} for s in buckets)
    for name in ("request_duration", "time_to_first_token", "time_per_output_token"):
        assert f"gen_ai_server_{name}_seconds" in families


def test_exemplars_carry_the_trace_id(telemetry: Telemetry, events: Events) -> None:
    trace = "0af7651916cd43dd8448eb211c80319c"
    events.run(telemetry, meta={"trace_id": f"00-{trace}-b7ad6b7169203331-01"})
    text, content_type = telemetry.metrics.exposition(OPENMETRICS)
    assert content_type.startswith("application/openmetrics-text")
    found = {
        family.name: exemplar.labels["trace_id"]
        for family in parse_openmetrics(text.decode())
        for s in family.samples
        if (exemplar := s.exemplar) is not None
    }
    expected = {"llm_inference_latency_seconds", "quaver_token_confidence", "quaver_token_entropy"}
    assert expected <= set(found)
    assert set(found.values()) == {trace}
    assert b"trace_id" not in telemetry.metrics.exposition("text/plain")[0]


@given(
    st.lists(
        st.tuples(
            st.integers(0, 3),
            st.one_of(st.floats(0, 12), st.just(float("nan")), st.sampled_from(names.TOKEN_ENTROPY.buckets)),
        ),
        max_size=40,
    )
)
def test_batch_histogram_counts_like_the_library(rows: list[tuple[int, float]]) -> None:
    routes = Labels(3)
    for name in ("a", "b", "c"):
        routes.index(name)
    spec = names.TOKEN_ENTROPY
    ours = CollectorRegistry()
    batch = BatchHistogram(spec, routes)
    ours.register(batch)
    theirs = CollectorRegistry()
    library = Histogram(spec.name, spec.help, spec.labels, registry=theirs, buckets=spec.buckets)
    route = np.array([row[0] for row in rows], np.intp)
    values = np.array([row[1] for row in rows], np.float64)
    batch.observe(route, values, np.full(len(rows), "t", object), 0.0)
    for index, value in rows:
        if not np.isnan(value):
            library.labels(routes.names[index]).observe(value)
    wanted = {
        (s.name, tuple(sorted(s.labels.items()))): s.value
        for family in theirs.collect()
        for s in family.samples
        if not s.name.endswith("_created")
    }
    got = {
        (s.name, tuple(sorted(s.labels.items()))): s.value
        for family in ours.collect()
        for s in family.samples
    }
    assert got.keys() == wanted.keys()
    np.testing.assert_allclose([got[key] for key in wanted], list(wanted.values()))


def test_labels_are_capped(make: Callable[..., Telemetry], events: Events) -> None:
    telemetry = make(max_routes=3, max_tenants=2)
    for number in range(30):
        events.run(
            telemetry, f"r{number}", meta={"route": f"route-{number}", "tenant": f"tenant-{number}"}, tokens=1
        )
    seen: dict[str, set[str]] = {"route": set(), "tenant": set()}
    for family in telemetry.registry.collect():
        for s in family.samples:
            for key in seen.keys() & s.labels.keys():
                seen[key].add(s.labels[key])
    assert seen["route"] == {"route-0", "route-1", "route-2", "other", "all"}
    assert seen["tenant"] == {"tenant-0", "tenant-1", "other"}
    assert (
        sample(telemetry, "quaver_responses_total", route="other", outcome="completed", reason="stop") == 27
    )


def test_labels_refuse_names_that_are_reserved_or_unclean() -> None:
    labels = Labels(8)
    assert [labels.name(value) for value in ("all", "other", "a\nb", "x" * 129, "", "ok")] == [
        "other"
    ] * 5 + ["ok"]


def test_canaries_stay_out_of_business_figures(telemetry: Telemetry, events: Events) -> None:
    events.run(telemetry, "c1", meta={"canary": True}, reason="abort", disconnected=True)
    assert sample(telemetry, "quaver_canaries_total", route="default", outcome="interrupted") == 1
    assert sample(telemetry, "quaver_interruptions_total", route="default") is None
    assert (
        sample(telemetry, "llm_inference_latency_seconds_count", model_name="tiny", quantization="unknown")
        is None
    )
    assert sample(telemetry, "quaver_tokens_total", route="default", kind="completion") == 3
    assert sample(telemetry, "quaver_joint_interruption_rate", route="all") is None


def test_the_prefix_cache_is_counted_on_when_the_model_process_starts_anew(
    telemetry: Telemetry, events: Events
) -> None:
    def step(hits: int, saved_s: float) -> None:
        stats = EngineStats(
            running=1,
            waiting=0,
            pages_used=1,
            pages_total=9,
            prefix_hits=hits,
            prefix_misses=2 * hits,
            prefix_saved_s=saved_s,
        )
        telemetry.on_step(events.step([("r1", 0)], 0, stats=stats))

    ready = Ready(
        pid=1,
        model="tiny",
        quantization="none",
        dtype="float32",
        backend="reference",
        layers=1,
        heads=1,
        vocab=1,
        max_context=1,
        kv_pages=9,
        page_size=16,
        deterministic=False,
    )
    telemetry.engine_ready(ready)
    step(3, 0.5)
    step(5, 0.75)
    telemetry.engine_ready(ready)
    step(4, 0.25)
    telemetry.catch_up()
    assert sample(telemetry, "quaver_prefix_cache_hits_total") == 9
    assert sample(telemetry, "quaver_prefix_cache_misses_total") == 18
    assert sample(telemetry, "quaver_prefix_cache_evictions_total") == 0
    assert sample(telemetry, "quaver_prefix_cache_collisions_total") == 0
    assert sample(telemetry, "quaver_kv_saved_seconds_total", tier="device") == 1.0


async def test_the_levels_of_the_door_are_gauges(telemetry: Telemetry) -> None:
    door = Door(0.0, running=2, waiting=1, delay_s=1.0, pool="fixed")
    door.enter(RequestMeta(request_id="r"), 2, 0.0)
    telemetry.watch_admission(lambda: door.levels(0.3))
    telemetry.start()
    await asyncio.sleep(0.25)
    assert sample(telemetry, "quaver_admission_pool") == 2
    assert sample(telemetry, "quaver_admission_in_flight") == 2
    assert sample(telemetry, "quaver_predicted_qps") == pytest.approx(0.1 * 2 / 0.2)
    assert sample(telemetry, "quaver_queue_delay_seconds") == 0.0


def test_levels_and_counters(telemetry: Telemetry, events: Events) -> None:
    telemetry.on_engine("ready")
    events.run(telemetry, reason="abort", disconnected=True)
    telemetry.on_rejected(events.meta("r2"), 503, "breaker_open")
    assert sample(telemetry, "quaver_kv_pages", state="used") == 10
    assert sample(telemetry, "quaver_kv_pages", state="cached") == 6
    assert sample(telemetry, "quaver_kv_pages", state="free") == 24
    assert sample(telemetry, "quaver_queue_depth") == 2
    assert sample(telemetry, "quaver_running") == 1
    assert sample(telemetry, "quaver_open_requests") == 0
    assert sample(telemetry, "quaver_interruptions_total", route="default") == 1
    rejected = {"route": "default", "outcome": "rejected", "reason": "breaker_open"}
    assert sample(telemetry, "quaver_responses_total", **rejected) == 1
    assert sample(telemetry, "quaver_engine_up") == 1
    telemetry.on_engine("lost")
    assert sample(telemetry, "quaver_engine_up") == 0
    assert sample(telemetry, "quaver_engine_restarts_total") == 1
    assert sample(telemetry, "quaver_running") == 0


def test_every_metric_is_declared_once_and_served(telemetry: Telemetry, events: Events) -> None:
    declared = [metric.name for metric in names.METRICS]
    assert len(declared) == len(set(declared)) == len({metric.otel for metric in names.METRICS})
    served = {family.name for family in telemetry.registry.collect()}
    assert served == set(declared)
