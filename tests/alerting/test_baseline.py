from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from alerting.baseline import (
    POOLED,
    BaselineError,
    build,
    load,
    save,
)
from alerting.collector import Collector
from alerting.limits import Count, conformal_threshold
from alerting.samples import Sample


def samples(number: int, route: str = "qa", seed: int = 0) -> list[Sample]:
    rng = np.random.default_rng(seed)
    names = (
        "sentence_confidence",
        "sentence_excess",
        "response_excess",
        "sentence_entropy",
        "response_entropy",
    )
    return [
        Sample(route=route, band="greedy", statistics={n: float(rng.normal(1, 0.2)) for n in names})
        for _ in range(number)
    ]


def test_round_trip(tmp_path: Path, rules) -> None:
    baseline = build(samples(100), rules, model="m", quantization="q", interruptions={"qa": Count(2, 50)})
    path = tmp_path / "deep" / "baseline.json"
    save(baseline, path)
    assert load(path) == baseline
    assert list(path.parent.iterdir()) == [path]


def test_rates_come_from_the_other_half(rules) -> None:
    preset = rules.preset("quantile")
    baseline = build(samples(2000), rules, model="m", quantization="q")
    stratum = baseline.stratum("qa", "greedy")
    assert stratum is not None
    limits = stratum.limits["quantile"]
    assert limits.counts["l1"].trials == 1000
    assert limits.counts["l1"].events / 1000 == pytest.approx(preset.alpha, abs=0.025)
    assert limits.counts["l1"].upper(0.95) > limits.counts["l1"].events / 1000


def test_fresh_healthy_responses_raise_about_alpha(rules) -> None:
    baseline = build(samples(2000), rules, model="m", quantization="q")
    limits = baseline.stratum("qa", "greedy").limits["quantile"]  # type: ignore[union-attr]
    preset = rules.preset("quantile")
    fresh = [limits.judge(s.statistics, preset)["l1"] for s in samples(4000, seed=9)]
    assert np.mean(fresh) < 0.075


def test_small_routes_share_the_pool_and_unknown_bands_have_nothing(rules) -> None:
    baseline = build(samples(60) + samples(10, "small"), rules, model="m", quantization="q")
    small = baseline.stratum("small", "greedy")
    assert small is not None
    assert small.route == POOLED
    assert baseline.stratum("qa", "greedy").route == "qa"  # type: ignore[union-attr]
    assert baseline.stratum("qa", "high") is None


def test_too_little_says_how_much_is_needed(rules) -> None:
    with pytest.raises(
        BaselineError,
        match=r"10 healthy responses are too few: a band of temperatures needs 40 .* at least 54",
    ):
        build(samples(10), rules, model="m", quantization="q")


def test_interruption_rate_has_a_floor_and_a_bound(rules) -> None:
    few = build(samples(60), rules, model="m", quantization="q", interruptions={"qa": Count(0, 1000)})
    assert few.interruption_rate("qa", rules) == rules.interruptions.floor
    many = build(samples(60), rules, model="m", quantization="q", interruptions={"qa": Count(20, 100)})
    assert 0.2 < many.interruption_rate("qa", rules) < 0.3
    assert many.interruption_rate("new", rules) == many.interruption_rate("qa", rules)


def test_mismatches_are_named(rules) -> None:
    baseline = build(samples(60), rules, model="m", quantization="Q4_1")
    assert baseline.mismatch(rules, "m", "Q4_1") is None
    assert baseline.mismatch(rules, None, None) is None
    assert "model m" in (baseline.mismatch(rules, "other", "Q4_1") or "")
    assert "Q8_0" in (baseline.mismatch(rules, "m", "Q8_0") or "")
    changed = rules.model_copy(
        update={"presets": rules.presets | {"raw": rules.preset("raw").model_copy(update={"run": 7})}}
    )
    assert "limits" in (baseline.mismatch(changed, "m", "Q4_1") or "")


@pytest.mark.parametrize("content", ["", "{", '{"version": 1}', "[]", '{"x":' * 50_000])
def test_damaged_files_are_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "baseline.json"
    path.write_text(content)
    with pytest.raises(BaselineError, match="quaver calibrate"):
        load(path)


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("thresholds", {"l1": None}),
        ("counts", {"l1": None}),
        ("counts", {"l1": {"events": 3, "trials": 2}}),
        ("counts", {"l1": {"events": -1, "trials": 2}}),
    ],
)
def test_baselines_that_cannot_judge_are_refused(tmp_path: Path, rules, part: str, change: dict) -> None:
    path = tmp_path / "baseline.json"
    save(build(samples(60), rules, model="m", quantization="q"), path)
    content = json.loads(path.read_text())
    for limits in content["strata"][0]["limits"].values():
        changed = limits[part] | change
        limits[part] = {name: value for name, value in changed.items() if value is not None}
    path.write_text(json.dumps(content))
    with pytest.raises(BaselineError, match="not a baseline"):
        load(path)


def test_a_baseline_without_a_preset_is_a_mismatch(rules) -> None:
    baseline = build(samples(60), rules, model="m", quantization="q")
    strata = [msgspec.structs.replace(stratum, limits={}) for stratum in baseline.strata]
    lacking = msgspec.structs.replace(baseline, strata=strata)
    assert "lacks limits" in (lacking.mismatch(rules, "m", "q") or "")


def test_other_versions_and_missing_files_are_refused(tmp_path: Path, rules) -> None:
    path = tmp_path / "baseline.json"
    save(build(samples(60), rules, model="m", quantization="q"), path)
    path.write_text(path.read_text().replace('"version": 3', '"version": 9'))
    with pytest.raises(BaselineError, match="version 9"):
        load(path)
    with pytest.raises(BaselineError, match="cannot read"):
        load(tmp_path / "none.json")


def test_conformal_threshold() -> None:
    assert conformal_threshold([float(i) for i in range(1, 100)], 0.05) == 95
    assert conformal_threshold([1.0, 2.0, 3.0], 0.05) == 3


def test_collector_keeps_complete_responses_and_counts_interruptions(service, rules) -> None:
    collector = Collector(rules)
    for i in range(60):
        service.respond(collector, service.rows(24), leave_after=18 if i % 10 == 0 else None)
    service.respond(collector, service.rows(24), canary=True)
    assert len(collector.samples) == 54
    assert set(collector.samples[0].statistics) >= {"sentence_entropy", "response_excess"}
    baseline = collector.build(quantization="none")
    assert baseline.model == "toy"
    assert baseline.interruptions["qa"] == Count(6, 60)
