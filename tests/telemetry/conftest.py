"""Engine events built by hand: what the engine would send, without a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.hooks import RequestEnded, RequestStarted
from engine.messages import HEAD_SIGNALS, TOKEN_SIGNALS, EngineStats, Finish, RequestMeta, StepOutput
from telemetry.hub import Telemetry
from telemetry.settings import TelemetrySettings

START = 1_800_000_000.0


class Clock:
    """Unix time that only moves when told."""

    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> float:
        return self.now


class Events:
    """Makes engine events at the clock's time."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.steps = 0

    def meta(self, request_id: str = "r1", **fields: Any) -> RequestMeta:
        return RequestMeta(request_id=request_id, **fields)

    def started(self, meta: RequestMeta, **fields: Any) -> RequestStarted:
        values: dict[str, Any] = {
            "time": self.clock.now,
            "endpoint": "chat",
            "stream": True,
            "model": "tiny",
            "prompt_tokens": 7,
            "choices": 1,
            "max_tokens": 64,
            "temperature": 0.0,
            "faults": [],
            "prompt": "the secret prompt",
        }
        return RequestStarted(meta=meta, **(values | fields))

    def step(
        self,
        keys: list[tuple[str, int]],
        index: int,
        signals: np.ndarray | None = None,
        *,
        detail: list[int] | None = None,
        layers: int = 3,
        heads: int = 2,
        **fields: Any,
    ) -> StepOutput:
        """One step that gives every key its `index`-th token; `signals` [rows, TOKEN_SIGNALS]."""
        self.steps += 1
        detail = detail or []
        if signals is None:
            signals = np.tile(np.array([0.5, 0.6, 0.3, 1, 1.5, 0.5, 1.5]), (len(keys), 1))
        shape = (len(detail), len(HEAD_SIGNALS), layers, heads)
        values: dict[str, Any] = {
            "step": self.steps,
            "time": self.clock.now,
            "duration_s": 0.02,
            "prefill_tokens": 0,
            "request_ids": [key[0] for key in keys],
            "choices": [key[1] for key in keys],
            "steps": [index] * len(keys),
            "token_ids": np.full(len(keys), 65 + index, "<i4").tobytes(),
            "signals": signals.astype("<f4").tobytes(),
            "layers": list(range(layers)),
            "heads_per_layer": heads,
            "layer_stride": 4,
            "detail_rows": detail,
            "detail_reasons": ["floor"] * len(detail),
            "detail_rates": [0.125] * len(detail),
            "lens_entropy": np.full((len(detail), layers), 2.5, "<f2").tobytes(),
            "heads": np.arange(np.prod(shape), dtype="<f2").reshape(shape).tobytes(),
            "stats": EngineStats(running=len(keys), waiting=2, pages_used=10, pages_cached=6, pages_total=40),
        }
        return StepOutput(**(values | fields))

    def finish(self, request_id: str, choice: int = 0, reason: str = "stop", tokens: int = 3) -> Finish:
        return Finish(
            request_id=request_id,
            choice=choice,
            reason=reason,  # type: ignore[arg-type]
            prompt_tokens=7,
            completion_tokens=tokens,
            queued_s=0.01,
            prefill_s=0.02,
        )

    def ended(self, meta: RequestMeta, **fields: Any) -> RequestEnded:
        values: dict[str, Any] = {
            "time": self.clock.now,
            "reason": "stop",
            "disconnected": False,
            "error": None,
            "prompt_tokens": 7,
            "cached_tokens": 4,
            "completion_tokens": 3,
            "queued_s": 0.01,
            "prefill_s": 0.02,
            "first_token_s": 0.1,
            "duration_s": 0.5,
            "token_times_s": [0.2, 0.2],
            "faults": [],
            "aggregates": {"mean_confidence": 0.6},
            "output": "the secret answer",
        }
        return RequestEnded(meta=meta, **(values | fields))

    def run(
        self, telemetry: Telemetry, request_id: str = "r1", tokens: int = 3, **fields: Any
    ) -> RequestMeta:
        """Play one whole request; `fields` go to its end, `meta` and `started` to the other two.

        `alert` names one that is raised while it runs.
        """
        meta = self.meta(request_id, **fields.pop("meta", {}))
        telemetry.on_started(self.started(meta, **fields.pop("started", {})))
        if "alert" in fields:
            telemetry.alert_raised(request_id, fields.pop("alert"))
        for index in range(tokens):
            self.clock.now += 0.1
            finished = [self.finish(request_id, tokens=tokens)] if index == tokens - 1 else []
            telemetry.on_step(self.step([(request_id, 0)], index, detail=[0], finished=finished))
        telemetry.on_ended(self.ended(meta, **({"completion_tokens": tokens} | fields)))
        return meta


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def events(clock: Clock) -> Events:
    return Events(clock)


@pytest.fixture
def settings(tmp_path: Path) -> TelemetrySettings:
    return TelemetrySettings(records_dir=tmp_path / "records", records_flush_s=0.05)


@pytest.fixture
def make(clock: Clock, settings: TelemetrySettings) -> Iterator[Callable[..., Telemetry]]:
    """Make a `Telemetry` with some settings changed; closed at the end of the test."""
    made: list[Telemetry] = []

    def build(token_bytes: Callable[[int], bytes] | None = None, **changes: Any) -> Telemetry:
        exporters = {key: changes.pop(key) for key in ("span_exporter", "metric_exporter") if key in changes}
        telemetry = Telemetry(settings.model_copy(update=changes), token_bytes, clock=clock, **exporters)
        made.append(telemetry)
        return telemetry

    yield build
    for telemetry in made:
        telemetry.close()


@pytest.fixture
def telemetry(make: Callable[..., Telemetry]) -> Telemetry:
    return make()


SIGNAL = {name: index for index, name in enumerate(TOKEN_SIGNALS)}
