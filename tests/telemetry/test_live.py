from __future__ import annotations

import msgspec
import pytest

from telemetry.hub import Telemetry
from telemetry.live import Live, percentile

from .conftest import START, Clock, Events


def test_bins_are_seconds_and_quiet_ones_are_null(telemetry: Telemetry, events: Events, clock: Clock) -> None:
    events.run(telemetry, "r1", tokens=3)
    clock.now = START + 2
    events.run(telemetry, "r2", tokens=2, reason="error", first_token_s=0.4, alert="L1")
    telemetry.alert_raised("r2", "L1")  # of a request that is over: no part of its rate
    got = telemetry.live.series(START + 2.5, 4)
    assert got["time"] == [int(START) - 1, int(START), int(START) + 1, int(START) + 2]
    series = got["series"]
    assert series["tokens_per_s"] == [None, 3, None, 2]
    assert series["mean_confidence"] == [None, pytest.approx(0.6), None, pytest.approx(0.6)]
    assert series["requests"] == [None, 1, None, 1]
    assert series["errors"] == [None, 0, None, 1]
    assert series["error_rate"] == [None, 0, 0, 0.5]
    assert series["first_token_p95"] == [None, 0.1, 0.1, 0.4]
    assert series["l1_rate"] == [None, 0, 0, 0.5]
    assert series["kv_used"] == [None, 0.25, None, 0.25]
    assert {len(values) for values in series.values()} == {4}
    msgspec.json.encode(got)


def test_the_ring_is_bounded() -> None:
    live = Live()
    for second in range(5000):
        live.at(START + second)
    assert len(live.series(START + 5000, 10_000)["time"]) == 3600
    assert len(live._bins) == 3600


def test_a_percentile_is_one_of_the_values() -> None:
    assert percentile([], 0.95) is None
    assert percentile([3.0], 0.95) == 3.0
    assert percentile([float(n) for n in range(1, 101)], 0.95) == 95.0
    assert percentile([1.0, 2.0], 1.0) == 2.0
