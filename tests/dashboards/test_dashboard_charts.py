"""Chart builders on data with gaps, and what the tiles say of it."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest

from dashboards import charts, judge, maps
from dashboards.charts import Line
from dashboards.intervals import Interval, alert_intervals, fault_intervals, what_fired
from dashboards.palette import BLUE
from dashboards.shapes import Alert, Alerts, Chaos, Detail, Entry, Instant, Layers, Lease, Live, read

LINE = Line("a", "alpha", BLUE)


def at(values: list[float | None]) -> Live:
    return Live(time=[Instant(100.0 + n) for n in range(len(values))], series={"a": values})


def test_frame_keeps_gaps_and_marks_lone_values() -> None:
    data = charts.frame(at([1.0, None, 2.0, None, 3.0, 4.0]), [LINE])
    assert data["value"].isna().tolist() == [False, True, False, True, False, False]
    assert data["alone"].tolist() == [True, False, True, False, False, False]
    assert data["time"].tolist()[0] == 100_000.0


def test_series_that_is_absent_is_all_gaps() -> None:
    data = charts.frame(at([1.0]), [Line("b", "beta", BLUE)])
    assert data["value"].isna().all()


@pytest.mark.parametrize("values", [[], [None, None], [0.0, None, 1.0]])
def test_time_series_builds_on_gaps(values: list[float | None]) -> None:
    shade = charts.bands([], 100.0, 110.0)
    picture = charts.time_series(
        charts.frame(at(values), [LINE]), [LINE], shade, form=".2f", domain=(0.0, 1.0)
    )
    spec = picture.to_dict()
    assert spec["resolve"]["scale"]["color"] == "independent"
    assert "NaN" not in str(spec)


def test_bands_are_clipped_to_the_axis() -> None:
    intervals = [
        Interval("fault", "noise", 90.0, 105.0),
        Interval("L2", "page", 108.0, None),
        Interval("L1", "over", 10.0, 20.0),
    ]
    shade = charts.bands(intervals, 100.0, 110.0)
    assert shade[["start", "end"]].to_numpy().tolist() == [[100_000.0, 105_000.0], [108_000.0, 110_000.0]]
    assert shade["lane"].tolist() == ["Faults", "L2"]
    charts.lanes(shade, 100.0, 110.0).to_dict()
    assert "noise from" in charts.told(shade)
    assert charts.told(charts.bands([], 0.0, 1.0)).startswith("No fault")


def test_overlapping_alerts_get_lanes_of_their_own() -> None:
    spans = [(1.0, 9.0), (2.0, 4.0), (3.0, 5.0), (4.0, 6.0)]
    shade = charts.bands([Interval("L2", "x", start, end) for start, end in spans], 0.0, 10.0)
    assert shade["lane"].tolist() == ["L2", "L2·1", "L2·2", "L2·1"]


def entry(time: float, event: str, fault: str, **facts: object) -> Entry:
    return Entry(time=Instant(time), event=event, id=fault, kind="noise", **facts)  # type: ignore[arg-type]


def test_fault_ends_by_the_journal_by_its_time_or_not_yet() -> None:
    journal = [
        entry(3.0, "start", "c", ttl_s=60.0),
        entry(2.0, "start", "b", ttl_s=5.0),
        entry(1.5, "end", "a"),
        entry(1.0, "start", "a", ttl_s=9.0),
        Entry(time=Instant(4.0), event="halt"),
    ]
    chaos = Chaos(journal=journal, faults=[Lease(id="c", kind="noise")])
    assert [(i.start, i.end) for i in fault_intervals(chaos)] == [(1.0, 1.5), (2.0, 7.0), (3.0, None)]


def test_what_fired_pairs_faults_with_alerts() -> None:
    alert = Alert(name="page", level="L2", route="qa", starts_at=Instant(12.0))
    faults = [Interval("fault", "noise", 10.0, 20.0), Interval("fault", "cut", 100.0, 110.0)]
    rows = what_fired(faults, Alerts(active=[alert]))
    assert [(row.fault.label, row.after_s) for row in rows] == [("cut", None), ("noise", 2.0)]
    assert [interval.kind for interval in alert_intervals(Alerts(history=[alert]))] == ["L2"]


def detail(kl: list[object] | None, steps: tuple[int, ...] = (0, 8)) -> Detail:
    shared = {"layers": [0, 4, 5], "lens_entropy": [9.0, None, 1.0], "head_kl": kl}
    rows = [shared | {"step": step} for step in steps]
    body = {
        "request": {"request_id": "r"},
        "tokens": {"choice": [0] * 12, "step": list(range(12)), "text": [None] * 12},
        "layers": {"layers": [0, 4, 5], "heads": 2, "rows": rows},
    }
    return read(msgspec.json.encode(body), Detail)


def test_head_map_averages_what_is_known() -> None:
    flat = [0.1, 0.2, 0.3, None, 0.5, 0.6]
    nested = [[0.1, 0.2], [0.3, None], [0.5, 0.6]]
    for shape in (flat, nested):
        data = maps.head_values(detail(shape).layers, "head_kl", None)
        assert data["value"].isna().sum() == 1
        assert math.isclose(data["value"].max(), 0.6)
        maps.head_chart(data, "light", "nats").to_dict()
    assert maps.head_values(detail(None).layers, "head_kl", None).empty
    assert maps.head_values(Layers(), "head_kl", 3).empty


def test_tokens_of_different_layers_share_a_map() -> None:
    rows = [
        {
            "step": 1,
            "layers": [0, 5],
            "lens_entropy": [8.0, 1.0],
            "head_kl": [[0.2], [0.6]],
            "reason": "risk",
        },
        {"step": 2, "layers": [3, 5], "lens_entropy": [6.0, 2.0], "head_kl": [[0.4], [0.2]], "rate": 1 / 3},
    ]
    rows[0]["rate"], rows[1]["reason"] = 1.0, "floor"
    body = {
        "request": {"request_id": "r"},
        "tokens": {"choice": [0] * 4, "step": [0, 1, 2, 3], "text": [None] * 4},
        "layers": {"layers": [0, 3, 5], "heads": 1, "rows": rows},
    }
    found = read(msgspec.json.encode(body), Detail)
    flow = maps.entropy_flow(found, 1)
    assert list(zip(flow["token"], flow["layer"], flow["entropy"], strict=True)) == [
        (1, 0, 8.0),
        (1, 5, 1.0),
        (2, 3, 6.0),
        (2, 5, 2.0),
    ]
    whole = maps.head_values(found.layers, "head_kl", None).set_index("layer")["value"]
    assert whole.to_dict() == pytest.approx({0: 0.2, 3: 0.4, 5: (0.6 + 3 * 0.2) / 4})
    assert maps.head_values(found.layers, "head_kl", 2)["layer"].tolist() == [3, 5]
    told = maps.why_sampled(found)
    assert told == "2 of 4 tokens are sampled: 1 looked risky, 1 were taken whatever they looked like."


def test_entropy_flow_takes_sampled_tokens_and_fixed_colours() -> None:
    found = detail(None)
    data = maps.entropy_flow(found, 5)
    assert data["token"].unique().tolist() == [0, 8]
    spec = maps.entropy_chart(data, 8, "light").to_dict()
    scale = spec["layer"][0]["encoding"]["color"]["scale"]
    assert scale["domain"] == list(maps.ENTROPY_DOMAIN)
    assert scale["scheme"] == "cividis"
    assert maps.nearest(maps.sampled(found), 5) == 8
    many = maps.entropy_flow(detail(None, tuple(range(12))), 5)
    assert many["token"].nunique() == 12


def test_labels_of_the_map_cannot_leave_their_strings() -> None:
    data = maps.entropy_flow(detail(None), 0).assign(text="'\"]\\\n;alert(1)//")
    spec = maps.entropy_chart(data, 0, "dark").to_dict()
    axis = spec["layer"][0]["encoding"]["x"]["axis"]["labelExpr"]
    assert axis.endswith("}[datum.value]")
    assert r"'\"]\\\n;alert(1)//" in axis


def test_clip_domain_is_the_middle_ninety_per_cent() -> None:
    low, high = maps.clip_domain([*np.linspace(0.0, 1.0, 101).tolist(), None, float("nan")])
    assert (round(low, 2), round(high, 2)) == (0.05, 0.95)
    assert maps.clip_domain([]) == (0.0, 1.0)
    low, high = maps.clip_domain([2.0, 2.0])
    assert high > low


def test_phases_stand_in_for_spans() -> None:
    body = b'{"request":{"request_id":"r","started":10,"duration_s":2,"queued_s":0.5,"first_token_s":1}}'
    frame = maps.span_frame(maps.phases(read(body, Detail)))
    assert frame["name"].tolist() == ["request", "queue", "prefill", "decode"]
    assert frame["length"].tolist() == [2000.0, 500.0, 500.0, 1000.0]
    maps.span_chart(frame).to_dict()
    assert maps.span_frame([]).empty


def test_one_choice_at_a_time() -> None:
    body = b"""{"request":{"request_id":"r"},"tokens":{"choice":[0,0,1],"step":[0,1,0],"text":["a","b","c"]},
        "layers":{"layers":[0],"heads":1,"rows":[{"step":0,"choice":0},{"step":0,"choice":1}]}}"""
    found = read(body, Detail)
    assert found.choices() == [0, 1]
    assert found.only(1).tokens["text"] == ["c"]
    assert [row.choice for row in found.only(1).layers.rows] == [1]


def test_tiles_say_no_traffic_in_words() -> None:
    tiles = judge.tiles(judge.QUALITY + judge.ENGINE, Live(series={"running": [None]}), Alerts())
    assert {tile.word for tile in tiles} == {"no traffic"}
    assert not any("nan" in tile.value for tile in tiles)


def test_tiles_are_judged_by_alerts_and_limits() -> None:
    live = Live(
        series={"mean_confidence": [0.5], "first_token_p95": [0.9], "kv_used": [0.2], "errors": [3, 4]}
    )
    paged = Alerts(active=[Alert(name="x", level="L2")])
    words = {tile.label: tile.state for tile in judge.tiles(judge.QUALITY + judge.ENGINE, live, paged)}
    assert words["Mean confidence"] == "alarm"
    assert words["First token p95"] == "watch"
    assert words["Errors"] == "alarm"
    assert words["KV cache used"] == "steady"
    blind = Alerts(evaluator={"baseline_problem": "no baseline; run `quaver calibrate`"})
    assert judge.tiles(judge.QUALITY, live, blind)[0].word == "no baseline"


def test_breaker_tile_shows_the_worst_route() -> None:
    body = b'{"breaker":{"qa":{"state":"half_open"},"list":{"state":"open","mode":"enforce"}}}'
    tile = judge.breaker(read(body, Alerts))
    assert (tile.value, tile.state, tile.word) == ("open", "alarm", "list, enforce")
    assert judge.breaker(Alerts()).value == "closed"
