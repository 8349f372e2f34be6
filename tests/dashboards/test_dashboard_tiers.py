"""The picture and the charts of the KV tiers, on figures built by hand."""

from __future__ import annotations

import re

import pytest

from dashboards import flow, tier_charts
from dashboards.shapes import Instant, Live, Request, Tier, Tiers
from dashboards.views.request import _cached
from dashboards.views.tiers import blocks, gains, policy_fact

HOST = Tier(
    tier="host",
    bytes_used=512,
    bytes_total=1024,
    tokens=64,
    compression_ratio=0.5,
    rates={"stored_bytes": 100.0, "stores": 3.0, "promotions": 1.0, "loaded_bytes": 400.0, "hits": 4.0},
    counts={"hits": 7.0, "dropped_tokens": 1.0, "kept_tokens": 3.0},
)
TIERS = Tiers(
    age_edges_s=[1.0, 60.0, 3600.0],
    tiers=[Tier(tier="device", tokens=32, ages=[16, 0, 0, 16]), HOST],
)


def test_what_came_from_below_did_not_come_from_above() -> None:
    flows = flow.between(TIERS)
    assert flows["host"] == ((100.0, 2.0), (400.0, 4.0))
    assert flows["disk"] == ((0.0, 0.0), (0.0, 0.0))
    assert flow.told(TIERS) == "host: 100 B a second go down to it, 400 B come back; disk: off"


def test_arrows_are_as_thick_as_what_moves_and_a_tier_that_is_off_says_what_switches_it_on() -> None:
    html = flow.picture(TIERS)
    thick = [float(width) for width in re.findall(r"<i style=\"height:([0-9.]+)px", html)]
    assert thick == [7.0, 12.0, 2.0, 2.0]
    assert html.count("q-still") == 2
    assert "QUAVER_KV_DISK_DIR" in html
    assert "50%" in html
    assert "0.50 × the pool" in html


@pytest.mark.parametrize(
    ("count", "said"),
    [(0, "0 B"), (999, "999 B"), (1000, "0.977 KiB"), (5 << 20, "5 MiB"), (1 << 42, "4 TiB")],
)
def test_bytes_in_words(count: float, said: str) -> None:
    assert flow.size(count) == said


def test_sources_are_summed_in_bins_that_meet() -> None:
    live = Live(
        time=[Instant(100.0 + n) for n in range(20)],
        series={"prompt_computed": [None] * 20, "prompt_disk": [10.0, None, 20.0, *[None] * 16, 40.0]},
    )
    data = tier_charts.sources(live)
    disk = data[data["source"] == "disk"]
    assert disk[["time", "tokens"]].to_numpy().tolist() == [[100_000.0, 3.0], [110_000.0, 4.0]]
    assert data[data["source"] == "computed"]["tokens"].tolist() == [0.0, 0.0]
    assert "NaN" not in str(tier_charts.source_chart(data).to_dict())
    assert tier_charts.sources(Live()).empty
    assert tier_charts.sources(Live(time=live.time, series={"prompt_host": [None] * 20})).empty


def test_ages_have_names_and_empty_bins_no_bar() -> None:
    assert tier_charts.age_labels(TIERS.age_edges_s) == [
        "under 1 s",
        "1 s – 1 min",
        "1 min – 1 h",
        "over 1 h",
    ]
    assert tier_charts.age_labels([]) == []
    data = tier_charts.ages(TIERS)
    assert data[["tier", "age", "tokens"]].to_numpy().tolist() == [
        ["device", "under 1 s", 16],
        ["device", "over 1 h", 16],
    ]
    tier_charts.age_chart(data, TIERS, "dark").to_dict()


def test_tables_and_facts() -> None:
    assert gains(TIERS)["tier"].tolist() == ["device", "host"]
    table = blocks(TIERS)
    assert table["hits"].tolist() == [7]
    assert table["dropped, share"].tolist() == [0.25]
    assert policy_fact("full", 0.85) == ("Pages copied ahead above", "85% of the pool")
    assert policy_fact("some_figure", 3) == ("some figure", "3")


@pytest.mark.parametrize(
    ("hits", "said"),
    [
        ({}, None),
        ({"kv_hit_device": 0, "kv_hit_host": 0, "kv_hit_disk": 0}, "none"),
        ({"kv_hit_device": 96, "kv_hit_host": 0, "kv_hit_disk": 64}, "96 device, 64 disk"),
    ],
)
def test_a_request_tells_where_its_prompt_came_from(hits: dict[str, int], said: str | None) -> None:
    assert _cached(Request(request_id="r", **hits)) == said
