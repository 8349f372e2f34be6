"""Figures of the KV tiers, from reports of the engine built by hand."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from engine.messages import AGE_EDGES_S, TIER_EDGES_S, EngineStats, Ready, TierStats
from telemetry.hub import Telemetry
from telemetry.tiers import Growth

from .conftest import Clock, Events

READY = Ready(
    pid=1,
    model="tiny",
    quantization="none",
    dtype="float32",
    backend="reference",
    layers=1,
    heads=1,
    vocab=1,
    max_context=1,
    kv_pages=40,
    page_size=16,
    kv_token_bytes=100,
    kv_block_tokens=64,
    kv_policy={"disk_age_s": 0.5},
    deterministic=False,
)


def tier(name: str = "host", **fields: Any) -> TierStats:
    counts = "bytes_used bytes_total blocks hits misses stores evictions loaded_bytes stored_bytes"
    values: dict[str, Any] = dict.fromkeys(f"{counts} corrupt late errors collisions".split(), 0)
    values |= {"load_s": 0.0, "store_s": 0.0, "load_counts": binned(), "store_counts": binned()}
    return TierStats(tier=name, **(values | fields))


def binned(**counts: int) -> list[int]:
    """Counts by TIER_EDGES_S; `b3=2`: two in the fourth bin."""
    return [counts.get(f"b{place}", 0) for place in range(len(TIER_EDGES_S) + 1)]


def sample(telemetry: Telemetry, name: str, **labels: str) -> float | None:
    return telemetry.registry.get_sample_value(name, labels)


def tell(telemetry: Telemetry, events: Events, *tiers: TierStats, **fields: Any) -> None:
    """Report between steps."""
    telemetry.on_step(events.step([], 0, tiers=list(tiers), duration_s=0.0, **fields))
    telemetry.catch_up()


def test_counts_go_on_when_the_model_process_starts_anew(telemetry: Telemetry, events: Events) -> None:
    telemetry.engine_ready(READY)
    tell(telemetry, events, tier(hits=3, late=1, saved_s=0.5, load_s=0.2, load_counts=binned(b2=3)))
    tell(telemetry, events, tier(hits=5, late=1, saved_s=0.75, load_s=0.3, load_counts=binned(b2=4, b9=1)))
    telemetry.on_engine("lost")
    assert sample(telemetry, "quaver_kv_tier_hits_total", tier="host") == 5
    assert sample(telemetry, "quaver_kv_tier_bytes", tier="host") is None
    telemetry.engine_ready(READY)
    tell(telemetry, events, tier(hits=4, saved_s=0.25, load_s=0.1, load_counts=binned(b2=4)))
    tell(telemetry, events, tier(hits=4, saved_s=0.25, load_s=0.1, load_counts=binned(b2=4)))
    assert sample(telemetry, "quaver_kv_tier_hits_total", tier="host") == 9
    assert sample(telemetry, "quaver_kv_tier_late_total", tier="host") == 1
    assert sample(telemetry, "quaver_kv_saved_seconds_total", tier="host") == 1.0
    name = "quaver_kv_tier_load_seconds"
    assert sample(telemetry, f"{name}_bucket", tier="host", le=str(TIER_EDGES_S[1])) == 0
    assert sample(telemetry, f"{name}_bucket", tier="host", le=str(TIER_EDGES_S[2])) == 8
    assert sample(telemetry, f"{name}_count", tier="host") == 9
    assert sample(telemetry, f"{name}_sum", tier="host") == pytest.approx(0.4)


def test_growth_never_falls() -> None:
    growth = Growth()
    assert [growth.of("a", count) for count in (2, 5, 4, 6)] == [2, 3, 0, 2]
    growth.restart()
    assert growth.of("a", 4) == 4


def test_levels_and_the_compression_ratio(telemetry: Telemetry, events: Events) -> None:
    telemetry.engine_ready(READY)
    host = tier(bytes_used=6400, bytes_total=64000, blocks=2, tokens=128)
    tell(telemetry, events, host, tier("disk", bytes_total=9000))
    for name, value in (("bytes", 6400), ("capacity_bytes", 64000), ("blocks", 2), ("tokens", 128)):
        assert sample(telemetry, f"quaver_kv_tier_{name}", tier="host") == value
    assert sample(telemetry, "quaver_kv_tier_compression_ratio", tier="host") == 0.5
    assert sample(telemetry, "quaver_kv_tier_compression_ratio", tier="disk") is None
    assert sample(telemetry, "quaver_kv_tier_tokens", tier="device") == 16 * 16
    assert sample(telemetry, "quaver_kv_tier_capacity_bytes", tier="device") == 40 * 16 * 100


def test_where_prompts_came_from_and_what_they_waited(telemetry: Telemetry, events: Events) -> None:
    finish = msgspec.structs.replace(
        events.finish("r1"),
        prompt_tokens=200,
        cached_tokens=160,
        tier_tokens={"device": 96, "disk": 64},
        loading_s=0.25,
    )
    tell(telemetry, events, finished=[finish])
    served = "quaver_kv_served_tokens_total"
    assert sample(telemetry, served, tier="device") == 96
    assert sample(telemetry, served, tier="host") is None
    assert sample(telemetry, served, tier="disk") == 64
    assert sample(telemetry, "quaver_kv_wait_seconds_sum") == 0.25
    series = telemetry.live.series(events.clock.now, 1)["series"]
    assert [series[f"prompt_{name}"] for name in ("computed", "device", "host", "disk")] == [
        [40],
        [96],
        [0],
        [64],
    ]


def test_a_report_between_steps_is_no_step(telemetry: Telemetry, events: Events) -> None:
    tell(telemetry, events, tier())
    assert sample(telemetry, "quaver_step_duration_seconds_count") == 0
    assert telemetry.live.series(events.clock.now, 1)["series"]["running"] == [None]


def test_the_route_tells_levels_ages_policy_and_rates_of_the_last_minute(
    telemetry: Telemetry, events: Events, clock: Clock
) -> None:
    client = TestClient(Starlette(routes=telemetry.routes()))
    assert client.get("/quaver/tiers").json()["tiers"] == []
    telemetry.engine_ready(READY)
    clock.now += 1
    stats = EngineStats(running=0, waiting=0, pages_used=2, pages_cached=8, pages_total=40, prefix_hits=7)
    tell(telemetry, events, tier(stores=10, stored_bytes=1000), stats=stats)
    ages = {"device": [160, 0, 0, 0, 0, 0], "host": [0, 640, 0, 0, 0, 0]}
    clock.now += 100
    tell(telemetry, events, tier(stores=10, stored_bytes=1000), stats=stats)
    clock.now += 30
    after = tier(stores=40, stored_bytes=4000, store_s=0.6, store_counts=binned(b4=30))
    tell(telemetry, events, after, kv_ages=ages, stats=stats)
    tell(telemetry, events, after, stats=stats)  # without ages: the last ones hold
    told = client.get("/quaver/tiers").json()
    device, host = told["tiers"]
    assert told["window_s"] == 60
    assert told["age_edges_s"] == list(AGE_EDGES_S)
    assert told["policy"] == {"disk_age_s": 0.5}
    assert (told["page_tokens"], told["block_tokens"]) == (16, 64)
    assert device["tier"] == "device"
    assert (device["tokens"], device["ages"], device["counts"]["hits"]) == (160, ages["device"], 7)
    assert host["ages"] == ages["host"]
    assert host["counts"]["stores"] == 40
    assert host["rates"]["stores"] == 30 / 60
    assert host["rates"]["stored_bytes"] == 3000 / 60
    assert host["store_s"] == pytest.approx(0.02)
    assert host["load_s"] is None
    clock.now += 61
    assert client.get("/quaver/tiers").json()["tiers"][1]["rates"]["stores"] == 0
