"""Whatever stands where a signal should be: detectors go on, and an absent one speaks for nothing."""

from __future__ import annotations

import math

import numpy as np
import pytest

from alerting.baseline import Baseline
from alerting.collector import Collector
from alerting.rules import load_rules
from engine.messages import HEAD_SIGNALS, TOKEN_SIGNALS
from telemetry.signals import LayerBatch, ResponseEnded, ResponseStarted, TokenBatch
from tests.alerting.conftest import Service

VALUES = [True, False, 0.5, None, math.nan, math.inf, -math.inf]
SHAPES = [(0, 0, 0), (1, 0, 2), (1, 2, 0), (1, 2, 2)]


def answer(sink, signals: np.ndarray, heads: np.ndarray, request_id: str = "r") -> None:
    """Tell of one answer whose every token has `signals`, with one row of layer detail (or none)."""
    count = len(signals)
    sink.on_started(
        ResponseStarted(
            request_id=request_id,
            tenant="a",
            route="qa",
            canary=False,
            model="toy",
            temperature=0.0,
            prompt_tokens=10,
            time=1.0,
        )
    )
    sink.on_tokens(
        TokenBatch(
            time=1.0,
            request_ids=[request_id] * count,
            choices=[0] * count,
            steps=list(range(count)),
            signals=signals,
        )
    )
    rows, _, layers, _ = heads.shape
    sink.on_layers(
        LayerBatch(
            time=1.0,
            request_ids=[request_id] * rows,
            choices=[0] * rows,
            steps=[1] * rows,
            layers=list(range(layers)),
            stride=1,
            reasons=["full"] * rows,
            rates=[1.0] * rows,
            lens_entropy=np.zeros((rows, layers), np.float16),
            heads=heads,
        )
    )
    sink.on_sentence(request_id, 0, min(count, 2))
    sink.on_ended(
        ResponseEnded(
            request_id=request_id,
            time=2.0,
            finish_reason="stop",
            disconnected=False,
            completion_tokens=count,
            aggregates={},
        )
    )


@pytest.fixture(scope="module")
def health() -> Baseline:
    return Service(3).baseline(load_rules(), 60)


@pytest.mark.parametrize("shape", SHAPES, ids=repr)
@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_detectors_go_on(health, rules, watch, value, *, shape, tokens: int) -> None:
    signals = np.full((tokens, len(TOKEN_SIGNALS)), value, dtype=np.float32)
    rows, layers, heads = shape
    detail = np.full((rows, len(HEAD_SIGNALS), layers, heads), value, dtype=np.float16)
    w, collector = watch(baseline=health), Collector(rules)
    for sink in (w.evaluator, collector):
        answer(sink, signals, detail)
    w.evaluator.tick()
    usable = tokens > 0 and value is not None and math.isfinite(value)
    assert len(collector.samples) == usable
    for sample in collector.samples:
        assert all(math.isfinite(number) for number in sample.statistics.values())
    assert w.changes == []


@pytest.mark.parametrize("value", [None, math.nan, math.inf], ids=repr)
def test_one_absent_signal_leaves_the_others_to_speak(rules, value) -> None:
    rows = np.ones((5, len(TOKEN_SIGNALS)), dtype=np.float32)
    rows[:, TOKEN_SIGNALS.index("entropy_post")] = np.float32(math.nan if value is None else value)
    collector = Collector(rules)
    answer(collector, rows, np.empty((0, len(HEAD_SIGNALS), 0, 0), np.float16))
    (sample,) = collector.samples
    assert "sentence_entropy" in sample.statistics
    assert "sentence_entropy_post" not in sample.statistics
