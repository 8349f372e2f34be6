"""The benchmark of the KV tiers runs and says what it promises; how fast anything is, is not asked here."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from benchmarks import (
    intervals,
    kv_tiers,
    kv_tiers_first_token,
    kv_tiers_overhead,
    kv_tiers_quality,
    kv_tiers_replay,
    kv_tiers_report,
)
from engine.models import store
from engine.settings import EngineSettings

KEYS = (
    "device_hit_ratio_4k",
    "host_hit_ratio_4k",
    "disk_hit_ratio_4k",
    "host_bytes_ratio",
    "disk_bytes_ratio",
    "host_perplexity_delta",
    "shared_prompt_p95_ratio",
    "no_reuse_overhead_upper95",
    "disk_bytes_ratio_dropping",
)
SIZE = 200
PLAN = kv_tiers.Plan(
    first_token=kv_tiers_first_token.Plan(sizes=(SIZE,), rounds=2),
    replays=tuple(
        kv_tiers_replay.Plan(name, sessions=5, beginning=130, message=8, answer=4, grows=grows, clients=(2,),
                             requests=6, passes=2, pool=512, host_mb=2)
        for name, grows in (("shared", False), ("chat", True))
    ),
    overhead=kv_tiers_overhead.Plan(
        pairs=2, first=1, pool=512, loads={"prompts": kv_tiers_overhead.Load(2, 100, 3)}, settling=1
    ),
    quality=(kv_tiers_quality.Window(192, 128, 2),),
)  # fmt: skip


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Every section, as little as can be asked for; the model is pulled on first use."""
    store.pull("smollm2-135m", EngineSettings().model_cache)
    found = kv_tiers.run(PLAN, threads=1, only=set(kv_tiers.SECTIONS), folder=tmp_path_factory.mktemp("disk"))
    return json.loads(json.dumps(found, allow_nan=False))


@pytest.mark.model
def test_result_has_every_key_and_null_where_nothing_was_measured(measured):
    assert all(key in measured for key in KEYS)
    assert kv_tiers_report.TARGETS.keys() == set(KEYS)
    assert measured["device_hit_ratio_4k"] is None  # no prompt was so long
    assert measured["shared_prompt_p95_ratio"] is None  # nor were there eight clients
    assert measured["machine"]["cores"] >= 1
    assert measured["sections"] == sorted(kv_tiers.SECTIONS)


@pytest.mark.model
def test_each_prompt_comes_from_the_tier_that_the_row_says(measured):
    found = measured["first_token"]["sizes"][str(SIZE)]
    whole = SIZE // 64 * 64
    assert found["hits"]["device"]["tokens"] == {"device": SIZE // 16 * 16}
    assert found["hits"]["host"]["tokens"] == {"host": whole}
    assert found["hits"]["disk"]["tokens"] == found["hits"]["restart"]["tokens"] == {"disk": whole}
    assert found["cold_way"] in found["ms"]
    for tier, hit in found["hits"].items():
        assert len(found["ms"][tier]) == 2
        assert hit["ratio"]["lower95"] <= hit["ratio"]["median"] <= hit["ratio"]["upper95"]
        assert hit["ms"] > 0
    assert all(found["hits"][tier]["limit_ms"] > 0 for tier in ("host", "disk", "restart"))
    assert all(rate > 0 for rate in measured["first_token"]["limits"].values())


@pytest.mark.model
@pytest.mark.parametrize("name", ["shared", "chat"])
def test_replays_count_every_arm_alike_and_tiers_find_what_pages_alone_forget(measured, name):
    one = measured[name]["clients"]["2"]
    arms = one["arms"]
    assert arms.keys() == kv_tiers_replay.ARMS.keys()
    assert all(len(arm["ms"]) == 12 and arm["p50_ms"] <= arm["p95_ms"] for arm in arms.values())
    hits = {arm: sum(row["hit_ratio"].values()) for arm, row in arms.items()}
    assert hits["nothing kept"] == 0
    assert hits["pages alone"] < hits["with tiers"] <= 1
    assert sum(tier["loaded_bytes"] for tier in arms["with tiers"]["tiers"].values()) > 0
    assert one["p95_ratio"].keys() == {"nothing kept", "pages alone"}


@pytest.mark.model
def test_a_round_trip_halves_the_bytes_and_changes_little(measured):
    assert 0.5 < measured["host_bytes_ratio"] < 0.53
    assert measured["disk_bytes_ratio"] < 0.53
    (row,) = measured["quality"]["without dropping"].values()
    assert row["tokens"] == 2 * 63
    assert abs(row["perplexity_delta"]) < 0.02
    assert row["top1_agreement"] > 0.95
    (row,) = measured["quality"]["with dropping"].values()  # so short that nothing is left out
    assert row["disk_bytes_ratio"] == measured["disk_bytes_ratio_dropping"] == measured["disk_bytes_ratio"]


@pytest.mark.model
def test_nothing_is_reused_where_that_is_what_is_measured(measured):
    for row in measured["overhead"].values():
        assert len(row["losses"]) == 2 and len(row["at_first"]["losses"]) == 1
        assert row["found_tokens"] == 0
        assert sum(row["stored_bytes"].values()) > 0
    assert measured["no_reuse_overhead_upper95"] == max(r["upper95"] for r in measured["overhead"].values())


@pytest.mark.model
def test_the_tables_show_what_was_measured_and_a_dash_for_what_was_not(measured):
    out = io.StringIO()
    kv_tiers_report.show(measured, Console(file=out, width=160))
    lines = {line.split("│")[1].strip(): line for line in out.getvalue().splitlines() if line.startswith("│")}
    assert "–" in lines["device_hit_ratio_4k"]
    assert f"{measured['host_bytes_ratio']:.3f}" in lines["host_bytes_ratio"]
    assert str(SIZE) in lines
    kv_tiers_report.show(dict.fromkeys(KEYS), Console(file=out))


def test_quantiles_are_compared_pair_by_pair():
    slow = [float(i) for i in range(1, 101)]
    found = intervals.quantile_ratio([value / 4 for value in slow], slow, 0.95)
    assert (found.lower95, found.median, found.upper95) == (0.25, 0.25, 0.25)


def test_a_mean_lies_within_its_bounds():
    found = intervals.mean([1.0, 2.0, 6.0])
    assert found.median == 3.0
    assert 1.0 <= found.lower95 <= 3.0 <= found.upper95 <= 6.0
