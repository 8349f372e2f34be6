"""The benchmark of the engine runs and says what it promises; how fast anything is, is not asked here."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks import engine, intervals, limits, quality, report, rows, serving, speed, variants
from benchmarks.client import Stream
from engine.models import store
from engine.models.config import weight_shapes
from engine.models.loader import load_config
from engine.settings import EngineSettings

KEYS = (
    "prefill_512_vs_llamacpp",
    "decode_1_8bit_vs_q8_0",
    "decode_1_4bit_vs_q4_0",
    "decode_16_vs_llamacpp",
    "signals_overhead_upper95",
    "full_signals_vs_transformers",
    "perplexity_delta",
    "top1_delta",
    "http_overhead",
    "ready_s",
    "limit_share",
)


@pytest.fixture(scope="module")
def model() -> Path:
    """The real model's file, pulled on first use into the user's cache."""
    return store.pull("smollm2-135m", EngineSettings().model_cache)


@pytest.fixture(scope="module")
def measured(model: Path) -> dict[str, Any]:
    """Speed, the signals' cost and quality of ours and transformers, as little as can be asked for."""
    plan = speed.Plan(rounds=2, prompts=(32,), steps={1: 3}, answers={2: 4}, pairs=1, pair_seconds=0)
    with pytest.MonkeyPatch.context() as patch, rows.Peers(threads=1) as peers:
        patch.setattr(variants, "llamacpp_is_there", lambda: False)
        patch.setattr(speed, "PROMPT", 16)
        run = engine.Run(peers, plan)
        gone = rows.Variant("nobody", "gone", ())
        run.attempt("gone", lambda: peers.of(gone).ask("describe"))
        run.attempt("speeds", lambda: run.speeds({"prefill", "decode"}))
        run.attempt("signals", run.signals)
        run.attempt("quality", lambda: run.quality(windows=1))
        return json.loads(json.dumps(run.result, allow_nan=False))


@pytest.mark.model
def test_result_has_every_key_and_null_where_nothing_was_measured(measured):
    assert all(key in measured for key in KEYS)
    assert measured["full_signals_vs_transformers"] > 0
    assert measured["signals_overhead_upper95"] == measured["signals"]["batch 2"]["losses"][0] < 1
    missing = ("prefill_512_vs_llamacpp", "decode_16_vs_llamacpp", "http_overhead", "ready_s")
    assert all(measured[key] is None for key in missing)
    assert measured["machine"]["cores"] >= 1 and measured["date"] and measured["versions"]["torch"]


@pytest.mark.model
def test_an_engine_that_fails_is_named_and_the_others_are_measured(measured):
    """Nobody is an engine that there is not."""
    assert measured["failed"].keys() == {"gone"} and "ended with status 1" in measured["failed"]["gone"]


@pytest.mark.model
def test_the_table_shows_what_was_measured_and_a_dash_for_what_was_not(measured):
    out = io.StringIO()
    report.show(measured, Console(file=out, width=160))
    lines = {line.split("│")[1].strip(): line for line in out.getvalue().splitlines() if line.startswith("│")}
    missing = lines["prefill_512_vs_llamacpp"]
    assert "–" in missing and "llama.cpp's fastest format" in missing
    assert f"{measured['full_signals_vs_transformers']:.3f}" in lines["full_signals_vs_transformers"]
    assert {row["name"] for row in measured["rows"]} | set(measured["quality"]) <= lines.keys()


@pytest.mark.model
def test_rows_of_every_engine_with_rounds_and_a_share_of_the_limit(measured):
    found = {(row["measure"], row["engine"], row["signals"]) for row in measured["rows"]}
    assert {("decode", "ours", s) for s in ("off", "budget", "full")} <= found
    assert {("prefill", "transformers", None), ("decode", "transformers", "full")} <= found
    for row in measured["rows"]:
        assert len(row["rounds"]) == 2 and min(row["rounds"]) > 0
        assert row["lower95"] <= row["tokens_per_s"] <= row["upper95"]
        assert 0 < row["limit_share"] < 1, row["name"]
    assert len(measured["limit_share"]) == len(measured["rows"])


@pytest.mark.model
def test_quality_is_near_float32(measured):
    """Every way through our kernels gives float32's perplexity but for rounding: a wrong position, a wrong
    page or a shifted token would be far off."""
    found = measured["quality"]
    assert found["float32"]["perplexity_ratio"] == 1 and found["float32"]["top1_disagreement"] == 0
    ours = [q for name, q in found.items() if name.startswith("ours")]
    assert len(ours) >= 2
    for judged in (*ours, found[quality.FLOOR]):
        assert judged["perplexity_ratio"] == pytest.approx(1, abs=0.03)
        assert judged["top1_disagreement"] < 0.06


def test_pairs_see_through_a_machine_that_changes_its_pace():
    pace = [1.0, 0.5, 2.0, 0.25, 4.0]
    found = intervals.ratio([3 * p for p in pace], [2 * p for p in pace])
    assert (found.lower95, found.median, found.upper95) == (1.5, 1.5, 1.5)


def test_bounds_enclose_the_median_and_widen_with_noise():
    calm, wild = intervals.of([10, 10.1, 9.9, 10, 10.05]), intervals.of([10, 14, 6, 10, 12])
    assert calm.lower95 <= calm.median <= calm.upper95
    assert wild.upper95 - wild.lower95 > 5 * (calm.upper95 - calm.lower95)


def test_everyone_begins_a_round_once():
    names = [rows.Row("decode", 1, rows.Variant("ours", name, ())) for name in "abc"]
    orders = ["".join(row.variant.format for row in rows.turned(names, number)) for number in range(-1, 3)]
    assert orders == ["cab", "abc", "bca", "cab"]


def test_one_sequence_is_bound_by_reading_and_a_long_prompt_by_arithmetic(model: Path):
    config = load_config(model)
    matrices = sum(math.prod(shape) for shape in weight_shapes(config).values() if len(shape) == 2)
    weights = limits.weights_of(config, 8, 8)
    assert weights == matrices, "a byte for each weight, the tied embedding once"
    allowed = limits.Limits({32: 100e9, 128: 20e9}, bf16=1e12, int8=2e12)
    disturbed = limits.Limits({32: 90e9, 128: 10e9}, bf16=3e11, int8=1e12)
    assert allowed.best_of(disturbed) == disturbed.best_of(allowed) == allowed
    one = limits.decode(config, weights, batch=1, context=1)
    assert one.seconds(allowed, 2e12) == pytest.approx(one.bytes / 20e9)
    assert weights < one.bytes < 1.01 * weights
    long = limits.prefill(config, weights, 2048)
    assert long.seconds(allowed, 2e12) == pytest.approx(long.operations / 2e12)
    assert long.operations > 2 * 2048 * (matrices - config.vocab * config.hidden)


def test_streams_count_tokens_and_not_events():
    """Two tokens whose text came in one event count as two."""
    stream = Stream(times=[0.0, 1.0, 2.0, 3.0, 4.0], tokens=10)
    assert stream.rate(0.0, 4.0) == pytest.approx(2.0)


def test_figures_compare_the_fastest_formats_at_the_default_budget():
    def row(family: str, format: str, signals: str | None, pace: float) -> rows.Row:
        return rows.Row("decode", 16, rows.Variant(family, format, (), signals), [pace, pace])

    found = report.ratios(
        [
            row("ours", "8-bit", "off", 900.0),
            row("ours", "8-bit", "budget", 600.0),
            row("ours", "4-bit", "budget", 500.0),
            row("llama.cpp", "Q4_0", None, 300.0),
            row("llama.cpp", "BF16", None, 200.0),
            row("transformers", "bf16", None, 100.0),
        ]
    )
    assert {name: interval.median for name, interval in found.items()} == {"decode_16_vs_llamacpp": 2.0}


def test_eight_bits_are_judged_by_their_worse_way():
    def judged(ratio: float, disagreement: float) -> dict[str, float]:
        return {"perplexity": 9.0, "perplexity_ratio": ratio, "top1_disagreement": disagreement}

    found = quality.deltas(
        {
            quality.FLOOR: judged(1.001, 0.01),
            "ours 8-bit, prefill": judged(1.002, 0.03),
            "ours 8-bit, decode": judged(1.006, 0.02),
            "ours 4-bit, decode": judged(1.5, 0.2),
        }
    )
    assert found["perplexity_delta"] == pytest.approx(0.005) and found["top1_delta"] == pytest.approx(0.02)
    assert quality.deltas({quality.FLOOR: judged(1.0, 0.0)}) == {}


@pytest.mark.model
def test_server_becomes_ready_and_streams(model: Path):
    with serving.served(threads=1) as server:
        assert math.isfinite(server.ready_s) and server.ready_s > 0
        found = serving.stream_all(server, [[5, 6, 7, 8], [9, 10, 11, 12]], tokens=12)
    assert found["tokens_per_s"] > 0 and 0 < found["cpu_s"] < found["wall_s"]
