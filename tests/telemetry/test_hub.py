from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from engine.hooks import ChoiceText, Observer, RecordEncoder
from telemetry import query
from telemetry.hub import Telemetry
from telemetry.signals import BusinessEvent, LayerBatch, ResponseEnded, ResponseStarted, TokenBatch

from .conftest import START, Events


class Recorder:
    """A sink that remembers its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def on_started(self, event: ResponseStarted) -> None:
        self.calls.append(("started", event))

    def on_lost(self, request_id: str, choice: int, what: str) -> None:
        self.calls.append(("lost", (request_id, choice, what)))

    def on_tokens(self, batch: TokenBatch) -> None:
        self.calls.append(("tokens", batch))

    def on_layers(self, batch: LayerBatch) -> None:
        self.calls.append(("layers", batch))

    def on_sentence(self, request_id: str, choice: int, tokens: int) -> None:
        self.calls.append(("sentence", (request_id, choice, tokens)))

    def on_ended(self, event: ResponseEnded) -> None:
        self.calls.append(("ended", event))

    def on_business(self, event: BusinessEvent) -> None:
        self.calls.append(("business", event))

    def of(self, kind: str) -> list[Any]:
        return [value for name, value in self.calls if name == kind]


class Broken(Recorder):
    """A sink that raises at every call."""

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("on_"):
            raise RuntimeError("broken sink")
        return super().__getattribute__(name)


def test_it_is_an_observer(telemetry: Telemetry) -> None:
    observer: Observer = telemetry
    encoder: RecordEncoder = telemetry.records
    assert encoder.records("unknown", 0) == []
    observer.on_engine("stopped")


def test_sinks_hear_everything_but_faults(telemetry: Telemetry, events: Events) -> None:
    sink = Recorder()
    telemetry.add_sink(sink)
    meta = events.meta("r1", route="qa", tenant="acme")
    telemetry.on_started(events.started(meta, faults=["f-secret"]))
    step = events.step([("r1", 0)], 0, detail=[0], touched={"r1": ["f-secret"]})
    telemetry.on_step(step)
    telemetry.annotate("r1", "fault", "f-secret")
    telemetry.on_ended(events.ended(meta, faults=["f-secret"]))
    assert [name for name, _ in sink.calls] == ["started", "tokens", "layers", "ended", "business"]
    assert sink.of("tokens")[0].signals.shape == (1, 7)
    assert sink.of("layers")[0].heads.shape == (1, 5, 3, 2)
    assert sink.of("business")[0].kind == "completed"
    assert sink.of("business")[0].route == "qa"
    for _, event in sink.calls:
        assert "f-secret" not in repr(msgspec.structs.asdict(event))
        assert "secret prompt" not in repr(msgspec.structs.asdict(event))
    assert telemetry.writer.flush()
    assert query.requests(telemetry.settings.records_dir)[0]["faults"] == ["f-secret"]


def test_a_broken_sink_stops_nobody(
    telemetry: Telemetry, events: Events, caplog: pytest.LogCaptureFixture
) -> None:
    sink = Recorder()
    telemetry.add_sink(Broken())
    telemetry.add_sink(sink)
    with caplog.at_level(logging.ERROR):
        for number in range(3):
            events.run(telemetry, f"r{number}")
    assert len(sink.of("ended")) == 3
    assert telemetry.registry.get_sample_value("quaver_sink_errors_total", {"sink": "Broken"}) == 27
    assert len(caplog.records) == 5  # one a method


def test_alerts_raised_while_a_response_ends_are_in_its_record(telemetry: Telemetry, events: Events) -> None:
    class Alarm(Recorder):
        def on_ended(self, event: ResponseEnded) -> None:
            telemetry.alert_raised(event.request_id, "L1")
            telemetry.alert_raised(event.request_id, "L1")

    telemetry.add_sink(Alarm())
    events.run(telemetry)
    telemetry.alert_raised("r1", "late")
    telemetry.writer.flush()
    assert query.requests(telemetry.settings.records_dir)[0]["alerts"] == ["L1"]
    dropped = telemetry.registry.get_sample_value("quaver_telemetry_dropped_total", {"what": "late_alerts"})
    assert dropped == 1


def test_a_request_ends_once_and_its_late_tokens_are_only_recorded(
    telemetry: Telemetry, events: Events
) -> None:
    sink = Recorder()
    telemetry.add_sink(sink)
    gone = events.run(telemetry, "gone", tokens=2)
    telemetry.on_ended(events.ended(gone))
    here = events.meta("here")
    telemetry.on_started(events.started(here))
    signals = np.arange(14.0).reshape(2, 7)
    telemetry.on_step(events.step([("gone", 0), ("here", 0)], 2, signals, detail=[0, 1]))
    telemetry.catch_up()
    batch, layers = sink.of("tokens")[-1], sink.of("layers")[-1]
    assert (batch.request_ids, layers.request_ids) == (["here"], ["here"])
    np.testing.assert_array_equal(batch.signals, signals[1:])
    assert layers.heads[0, 0, 0, 0] == 30  # the second row's detail
    telemetry.on_step(events.step([("gone", 0)], 3))
    telemetry.catch_up()
    assert len(sink.of("ended")) == 1
    telemetry.writer.flush()
    counted = query.select(
        telemetry.settings.records_dir, "SELECT request_id, count(*) AS n FROM tokens GROUP BY 1 ORDER BY 1"
    )
    assert counted == [{"request_id": "gone", "n": 4}, {"request_id": "here", "n": 1}]


def test_the_first_sentence_is_told_once_a_choice(telemetry: Telemetry, events: Events) -> None:
    sink = Recorder()
    telemetry.add_sink(sink)
    meta = events.meta("r1")
    telemetry.on_started(events.started(meta, choices=2))

    def say(choice: int, text: str) -> None:
        telemetry.on_text(ChoiceText(meta=meta, choice=choice, text=text, tokens=2, time=START))

    for text in ("Paris", " is", " it.", " And", " so. on"):
        say(0, text)
    say(1, "Yes.")
    assert sink.of("sentence") == [("r1", 0, 6)]
    telemetry.on_ended(events.ended(meta))
    assert sink.of("sentence") == [("r1", 0, 6), ("r1", 1, 2)]
    assert [name for name, _ in sink.calls][-3:] == ["sentence", "ended", "business"]


def test_business_events(telemetry: Telemetry, events: Events) -> None:
    sink = Recorder()
    telemetry.add_sink(sink)
    events.run(telemetry, "ok")
    events.run(telemetry, "left", reason="abort", disconnected=True)
    events.run(telemetry, "died", reason="error", error="x")
    telemetry.on_rejected(events.meta("shed"), 429, "queue_full")
    events.run(telemetry, "canary", meta={"canary": True}, reason="abort", disconnected=True)
    telemetry.on_rejected(events.meta("shed-canary", canary=True), 429, "queue_full")
    telemetry.business_event("task_done", "ok", 1.0)
    telemetry.business_event("task_done", "canary")
    telemetry.business_event("task_done", "unknown")
    told = [(event.request_id, event.kind) for event in sink.of("business")]
    assert told == [
        ("ok", "completed"),
        ("left", "interrupted"),
        ("died", "failed"),
        ("shed", "rejected"),
        ("ok", "task_done"),
    ]
    telemetry.writer.flush()
    rows = query.requests(telemetry.settings.records_dir)
    outcomes = {row["request_id"]: (row["outcome"], row["finish_reason"]) for row in rows}
    assert outcomes["left"] == ("interrupted", "abort")
    assert outcomes["shed"] == ("rejected", "shed")


@pytest.mark.parametrize("capture", [False, True])
def test_content_is_kept_only_when_captured(
    make: Callable[..., Telemetry], events: Events, capture: bool
) -> None:
    telemetry = make(lambda token: f"<{token}>".encode(), capture_content=capture)
    events.run(telemetry, "r1", tokens=2)
    running = events.meta("r2")
    telemetry.on_started(events.started(running))
    telemetry.on_step(events.step([("r2", 0)], 0))
    records = telemetry.records.records("r1", 0) + telemetry.records.records("r2", 0)
    spans = telemetry.spans.recent("r1")
    telemetry.on_ended(events.ended(running))
    telemetry.close()
    found = query.request(telemetry.settings.records_dir, "r1")
    assert found is not None
    everything = repr((found, records, spans, telemetry.metrics.exposition("")[0]))
    for secret in ("secret prompt", "secret answer", "<65>"):
        assert (secret in everything) == capture
    on_disk = b"".join(path.read_bytes() for path in telemetry.settings.records_dir.glob("*/*"))
    if not capture:
        assert b"secret" not in on_disk
    assert found["tokens"]["token_id"] == ([65, 66] if capture else [None, None])
    assert found["tokens"]["text"] == (["<65>", "<66>"] if capture else [None, None])
    assert records[0]["token_id"] == (65 if capture else None)


def test_signals_of_a_request_as_json(telemetry: Telemetry, events: Events) -> None:
    meta = events.meta("r1")
    telemetry.on_started(events.started(meta))
    telemetry.on_step(events.step([("r1", 0)], 0, detail=[0]))
    signals = np.array([[0.1, 0.9, np.nan, np.nan, 0.2, np.inf, 0.2]])
    telemetry.on_step(events.step([("r1", 0)], 1, signals))
    first, second = telemetry.records.records("r1", 0)
    assert (first["step"], first["rank"], first["entropy"]) == (0, 1, 1.5)
    assert first["layers"]["head_kl"] == [[0, 1], [2, 3], [4, 5]]
    assert (first["layers"]["reason"], first["layers"]["rate"], first["layers"]["stride"]) == (
        "floor",
        0.125,
        4,
    )
    assert "layers" not in second
    assert [second[name] for name in ("margin", "rank", "surprisal_post")] == [None] * 3
    assert telemetry.records.records("r1", 0, start=1) == [second]
    assert telemetry.records.records("r1", 1) == []
    msgspec.json.encode([first, second])
    telemetry.on_ended(events.ended(meta))
    assert len(telemetry.records.records("r1", 0)) == 2
    for number in range(64):
        events.run(telemetry, f"n{number}", tokens=1)
    assert telemetry.records.records("r1", 0) == []


def test_nothing_of_a_request_stays_behind(telemetry: Telemetry, events: Events) -> None:
    for number in range(200):
        events.run(telemetry, f"r{number}", tokens=1, reason="abort", disconnected=number % 2 == 0)
    assert len(telemetry._open) == 0
    assert telemetry._open.choice("r0", 0) is None
    assert not telemetry._open.running.tokens.any()
    assert telemetry._open.running.tokens.size == 64


async def test_the_ticker_turns_windows_without_traffic(
    make: Callable[..., Telemetry], events: Events
) -> None:
    telemetry = make()
    telemetry.start()
    events.run(telemetry, reason="abort", disconnected=True)
    telemetry.clock.now += 1.0  # type: ignore[attr-defined]
    await asyncio.sleep(0.25)
    assert telemetry.live.series(events.clock.now, 1)["series"]["interruption_rate"] == [1.0]
    telemetry.close()


def test_steps_of_a_window_are_taken_in_together(telemetry: Telemetry, events: Events) -> None:
    sink = Recorder()
    telemetry.add_sink(sink)
    for request_id in ("r1", "r2"):
        telemetry.on_started(events.started(events.meta(request_id)))
    telemetry.on_step(events.step([("r1", 0)], 0))
    events.clock.now += 0.05
    telemetry.on_step(events.step([("r1", 0), ("r2", 0)], 1))
    assert sink.of("tokens") == []
    events.clock.now += 0.06
    telemetry.on_step(events.step([("r2", 0)], 1))
    (batch,) = sink.of("tokens")
    assert (batch.request_ids, batch.steps) == (["r1", "r1", "r2"], [0, 1, 1])
    assert telemetry.joint.read("mean_confidence", events.clock.now).fresh == pytest.approx(0.6)
    telemetry.on_ended(events.ended(events.meta("r2")))
    assert [name for name, _ in sink.calls[-3:]] == ["tokens", "ended", "business"]
    assert len(telemetry.records.records("r2", 0)) == 2


class Loses:
    """A detail hook that loses the row of every token 1 and the layer detail of every token 2."""

    active = True

    def lost(self, metas: Any, choices: Any, steps: list[int]) -> tuple[set[int], set[int]]:
        return (
            {row for row, step in enumerate(steps) if step == 1},
            {row for row, step in enumerate(steps) if step == 2},
        )


def test_sinks_hear_what_was_lost_and_the_record_says_how_much(
    make: Callable[..., Telemetry], events: Events
) -> None:
    telemetry = make()
    sink = Recorder()
    telemetry.add_sink(sink)
    telemetry.detail_hook = Loses()
    events.run(telemetry, tokens=4)
    telemetry.detail_hook = None
    events.run(telemetry, "r2", tokens=4)
    telemetry.close()
    assert sink.of("lost") == [("r1", 0, "tokens"), ("r1", 0, "layers"), ("r1", 0, "layers")]
    assert [batch.steps for batch in sink.of("tokens") if batch.request_ids[0] == "r1"] == [[0], [2], [3]]
    rows = query.select(telemetry.settings.records_dir, "SELECT * FROM requests ORDER BY request_id", [])
    first, second = (dict(row["aggregates"]) for row in rows)
    assert (first["lost_tokens"], first["lost_layers"]) == (1, 2)
    assert not {"lost_tokens", "lost_layers"} & second.keys()
