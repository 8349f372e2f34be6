from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from typer.testing import CliRunner

from alerting import baseline as baselines
from alerting.backtest import backtest
from alerting.compare import compare, distance
from engine.messages import HEAD_SIGNALS, TOKEN_SIGNALS
from quaver.cli import app
from telemetry.query import select
from telemetry.record import TABLES
from telemetry.segments import Segment


class Recorder:
    """A SignalSink that writes what it is told as records, the way the server stores them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows: dict[str, list[dict]] = {name: [] for name in TABLES}
        self._open: dict[str, dict] = {}

    def on_started(self, event) -> None:
        self._open[event.request_id] = {
            "request_id": event.request_id,
            "tenant": event.tenant,
            "route": event.route,
            "canary": event.canary,
            "endpoint": "chat",
            "stream": True,
            "model": event.model,
            "started": utc(event.time),
            "prompt_tokens": event.prompt_tokens,
            "temperature": event.temperature,
            "aggregates": {},
        }

    def on_tokens(self, batch) -> None:
        keys = zip(batch.request_ids, batch.choices, batch.steps, batch.signals.tolist(), strict=True)
        for request_id, choice, step, values in keys:
            row = {"request_id": request_id, "choice": choice, "step": step, "time": utc(batch.time)}
            named = dict(zip(TOKEN_SIGNALS, values, strict=True))
            self.rows["tokens"].append(row | named | {"rank": int(named["rank"])})

    def on_sentence(self, request_id: str, choice: int, tokens: int) -> None:
        self._open[request_id]["aggregates"] = {"sentence_tokens": float(tokens)}

    def on_ended(self, event) -> None:
        self._open[event.request_id] |= {
            "ended": utc(event.time),
            "finish_reason": event.finish_reason,
            "disconnected": event.disconnected,
            "completion_tokens": event.completion_tokens,
            "duration_s": 1.0,
            "outcome": "interrupted" if event.disconnected else "completed",
        }
        self.rows["requests"].append(self._open.pop(event.request_id))

    def on_business(self, event) -> None: ...

    def write(self) -> Path:
        """Write a live segment of every table."""
        for name, schema in TABLES.items():
            (self.folder / name).mkdir(parents=True, exist_ok=True)
            if self.rows[name]:
                Segment(self.folder / name, schema).append(
                    pa.RecordBatch.from_pylist(self.rows[name], schema)
                )
        return self.folder


def utc(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


@pytest.fixture
def recorded(service, rules, watch, tmp_path):
    """Return the records' folder, the baseline, and a live evaluator that heard the same responses."""
    baseline = service.baseline(rules)
    recorder, w = Recorder(tmp_path / "records"), watch(baseline=baseline)

    def respond(rows: np.ndarray, **how) -> None:
        start = service.now
        service.respond(w.evaluator, rows, request_id=f"r{start}", **how)
        service.now = start
        service.respond(recorder, rows, request_id=f"r{start}", **how)

    for _ in range(30):
        respond(service.rows(24))
    for i in range(30):
        respond(service.rows(24, 2.5), leave_after=18 if i % 2 else None)
    respond(service.rows(24, 2.5), canary=True)
    respond(service.rows(24), route="quiet")
    return recorder.write(), baseline, w


def test_a_backtest_finds_what_the_live_evaluator_found(recorded, rules) -> None:
    folder, baseline, w = recorded
    report = backtest(folder, rules, "quantile", baseline)
    assert set(report.routes) == {"qa", "quiet"}
    qa = report.routes["qa"]
    assert (qa.responses, qa.interrupted, qa.tokens) == (60, 15, 45 * 24 + 15 * 18)
    assert qa.l1["quantile"] == len(w.l1) > 0
    assert set(qa.alerts) == {a.name for a in w.changes}
    assert report.routes["quiet"].alerts == {}
    first = next(fired for fired in report.fired if fired.name == "QuaverJointEvidence")
    assert 30 < first.responses < 60


def test_other_rules_and_no_baseline_are_tried_too(recorded, rules) -> None:
    folder, baseline, _ = recorded
    raw = backtest(folder, rules, "raw", baseline)
    assert raw.preset == "raw"
    assert "calibrate" in (backtest(folder, rules, "quantile", None).routes["qa"].blind or "")
    with pytest.raises(ValueError, match="no preset"):
        backtest(folder, rules, "loud", baseline)


def test_only_what_ended_since_is_replayed(recorded, rules, service) -> None:
    folder, baseline, _ = recorded
    assert backtest(folder, rules, "quantile", baseline, since=service.now + 1).routes == {}


def test_layers_reach_the_evaluator(service, rules, watch, tmp_path) -> None:
    recorder = Recorder(tmp_path / "records")
    service.respond(recorder, service.rows(12), request_id="r")
    flat = {name: [0.5] * 4 for name in HEAD_SIGNALS}
    recorder.rows["layers"].append(
        {"request_id": "r", "choice": 0, "step": 1, "layers": [0, 2], "heads": 2} | flat
    )
    report = backtest(recorder.write(), rules, "quantile", service.baseline(rules))
    assert report.routes["qa"].responses == 1


def test_the_command_tells_of_every_route(recorded, tmp_path, monkeypatch) -> None:
    folder, baseline, _ = recorded
    monkeypatch.setenv("QUAVER_STATE_DIR", str(tmp_path))
    baselines.save(baseline, tmp_path / "baseline.json")
    told = CliRunner().invoke(app, ["alerts", "backtest", "--dir", str(folder)])
    assert told.exit_code == 0, told.output
    assert "qa: 60 responses, 15 broken off" in told.output
    assert "QuaverJointEvidence would have fired 1 time" in told.output
    as_json = CliRunner().invoke(app, ["alerts", "backtest", "--json"])
    assert json.loads(as_json.output)["routes"]["qa"]["responses"] == 60
    (row, *_) = select(folder, "SELECT request_id FROM requests WHERE route = 'quiet'")
    told = CliRunner().invoke(app, ["alerts", "explain", row["request_id"], "--dir", str(folder)])
    assert told.output == "no pattern fits\n"
    struck = select(
        folder,
        "SELECT request_id FROM tokens GROUP BY request_id ORDER BY avg(entropy) DESC LIMIT 1",
    )[0]["request_id"]
    told = CliRunner().invoke(app, ["alerts", "explain", struck, "--dir", str(folder)])
    assert told.output.startswith("beyond_knowledge: ")
    missing = CliRunner().invoke(app, ["alerts", "explain", "nobody", "--dir", str(folder)])
    assert missing.exit_code != 0
    assert "nothing is recorded of nobody" in str(missing.exception)


def test_baselines_are_kept_and_compared(service, rules, tmp_path, monkeypatch) -> None:
    path = tmp_path / "baseline.json"
    assert baselines.archive(path) is None
    old = service.baseline(rules)
    baselines.save(old, path)
    copy = baselines.archive(path)
    assert copy is not None
    assert baselines.load(copy) == old
    service.rows = lambda tokens, plain=service.rows: plain(tokens, 1.0)
    baselines.save(service.baseline(rules), path)
    monkeypatch.setenv("QUAVER_STATE_DIR", str(tmp_path))
    told = CliRunner().invoke(app, ["alerts", "baseline", "diff"])
    assert told.exit_code == 0, told.output
    assert "moved qa/greedy sentence_entropy:high" in told.output
    shown = CliRunner().invoke(app, ["alerts", "baseline", "show", str(copy)])
    assert json.loads(shown.output)["model"] == "toy"


def test_two_baselines_of_the_same_traffic_did_not_move(service, rules) -> None:
    found = compare(service.baseline(rules), service.baseline(rules))
    assert (found.notes, found.gone, found.new) == ([], [], [])
    assert len(found.statistics) > 8
    assert not any(one.moved for one in found.statistics)


def test_distance_by_hand() -> None:
    assert distance([1.0, 2.0, 3.0, 4.0], [3.0, 4.0, 5.0, 6.0])[0] == 0.5
    assert distance([0.0] * 50, [1.0] * 50) == (1.0, True)
    assert distance([1.0] * 3, [2.0] * 3)[1] is False
