from __future__ import annotations

import asyncio
import time
from pathlib import Path

import httpx
import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from starlette.applications import Starlette

from alerting import baseline as baselines
from alerting.canary.prompt import Canary, Guarded
from alerting.rules import RulesError
from alerting.service import Alerting
from alerting.settings import AlertingSettings
from engine.messages import TOKEN_SIGNALS


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def make(tmp_path: Path, registry: CollectorRegistry, **settings: object) -> Alerting:
    return Alerting(AlertingSettings(**settings), registry, tmp_path)  # type: ignore[arg-type]


def http(alerting: Alerting) -> httpx.AsyncClient:
    app = Starlette(routes=list(alerting.routes()))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://t")


async def test_from_calibration_over_an_alert_to_the_notification(service, tmp_path, registry) -> None:
    service.now = time.time()
    alerting = make(tmp_path, registry, breaker="enforce")
    alerting.set_model("toy", "none")
    await alerting.start()
    async with http(alerting) as client:
        assert (await client.get("/quaver/alerts/calibration")).json()["running"] is False
        url = "/quaver/alerts/calibration"
        assert (await client.post(url, json={"action": "finish"})).status_code == 409
        for body in (b'{"action": "dance"}', b"[]", b"\xff", b"[" * 3000):
            assert (await client.post(url, content=body)).status_code == 400
        assert (await client.post(url, content=b" " * 5000)).status_code == 413
        await client.post(url, json={"action": "start"})
        for _ in range(30):
            service.respond(alerting.sink, service.rows(24))
        early = await client.post(url, json={"action": "finish"})
        assert early.status_code == 409
        assert "at least 54" in early.json()["error"]["message"]
        for _ in range(90):
            service.respond(alerting.sink, service.rows(24))
        done = (await client.post(url, json={"action": "finish"})).json()
        assert done["baseline"]["usable"] is True
        assert (tmp_path / "baseline.json").exists()

        for _ in range(30):
            service.respond(alerting.sink, service.rows(24, 2.5), leave_after=18)
        state = (await client.get("/quaver/alerts")).json()
        assert {"active", "history", "webhook", "rules", "breaker", "evaluator"} <= state.keys()
        names = {alert["name"] for alert in state["active"]}
        assert {"QuaverLowConfidenceRate", "QuaverUsersLeaving"} <= names
        alert = next(a for a in state["active"] if a["name"] == "QuaverUsersLeaving")
        assert (alert["level"], alert["route"], alert["state"], alert["endsAt"]) == (
            "L2",
            "qa",
            "firing",
            None,
        )
        assert alert["evidence"]["interruptions_live"] >= 3
        assert state["breaker"]["qa"]["state"] == "open"
        assert {n["labels"]["alertname"] for n in state["webhook"]} >= {"QuaverUsersLeaving"}
        assert state["events"][0]["requestId"]
        assert [rule["name"] for rule in state["rules"]]
    await alerting.stop()
    alerting.evaluator.tick()
    text = generate_latest(registry).decode()
    for line in (
        'quaver_l2_active{route="qa"} 1.0',
        'quaver_breaker_state{route="qa"} 2.0',
        'quaver_l1_live{route="qa"}',
        'quaver_edetector_log{route="qa",signal="l1"}',
        "quaver_evaluator_heartbeat_seconds",
        'quaver_alerts_sent_total{result="sent"}',
    ):
        assert line in text


async def test_one_calibration_at_a_time_unless_nobody_feeds_it(
    service, tmp_path, registry, monkeypatch
) -> None:
    alerting = make(tmp_path, registry)
    url = "/quaver/alerts/calibration"
    async with http(alerting) as client:
        assert (await client.post(url, json={"action": "start"})).status_code == 200
        service.respond(alerting.sink, service.rows(24))
        again = await client.post(url, json={"action": "start"})
        assert again.status_code == 409
        assert "quaver calibrate --cancel" in again.json()["error"]["message"]
        assert (await client.get(url)).json()["responses"] == 1  # the first goes on
        now = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: now + 59)
        service.respond(alerting.sink, service.rows(24))
        monkeypatch.setattr(time, "monotonic", lambda: now + 118)
        assert (await client.post(url, json={"action": "start"})).status_code == 409
        monkeypatch.setattr(time, "monotonic", lambda: now + 120)
        first = (await client.get(url)).json()["id"]
        taken = (await client.post(url, json={"action": "start"})).json()
        assert taken["responses"] == 0 and taken["id"] != first
        for action in ("finish", "cancel"):
            late = await client.post(url, json={"action": action, "id": first})
            assert late.status_code == 409 and "another one" in late.json()["error"]["message"]
        assert (await client.get(url)).json()["id"] == taken["id"]
        assert (await client.post(url, json={"action": "cancel"})).json()["running"] is False
        assert (await client.post(url, json={"action": "start"})).status_code == 200


async def test_while_canaries_are_asked_no_calibration_begins(tmp_path, registry) -> None:
    class Slow:
        def guarded(self) -> list[Guarded]:
            return []

        async def ask(self, *_: object, **__: object) -> str | None:
            await asyncio.sleep(3600)
            return None

    alerting = make(tmp_path, registry)
    alerting.set_model("toy", "none")
    alerting.canaries.ask([Canary(id="c", messages=[], max_tokens=1, right=bool)], Slow())
    async with http(alerting) as client:
        calibrate, start = {"action": "calibrate"}, {"action": "start"}
        begun = (await client.post("/quaver/canaries", json=calibrate)).json()["calibration"]
        assert begun["running"]
        again = await client.post("/quaver/canaries", json=calibrate)
        assert (again.status_code, "--cancel" in again.text) == (409, True)
        assert (await client.post("/quaver/alerts/calibration", json=start)).status_code == 409
        late = await client.post("/quaver/canaries", json={"action": "cancel", "id": "earlier"})
        assert (late.status_code, alerting.canaries.calibrating) == (409, True)
        own = {"action": "cancel", "id": begun["id"]}
        ended = await client.post("/quaver/canaries", json=own)
        assert ended.json()["calibration"]["running"] is False
        assert (await client.post("/quaver/alerts/calibration", json=start)).status_code == 200


async def test_a_restart_keeps_baseline_and_notifications(service, tmp_path, rules, registry) -> None:
    baselines.save(service.baseline(rules), tmp_path / "baseline.json")
    first = make(tmp_path, registry)
    for _ in range(30):
        service.respond(first.sink, service.rows(24, 3.0))
    told = first.state()["webhook"]
    assert told
    second = make(tmp_path, CollectorRegistry())
    assert second.state()["webhook"] == told
    assert second.state()["evaluator"]["baseline"]["usable"]


def test_a_damaged_baseline_is_said_not_fatal(service, tmp_path, registry) -> None:
    (tmp_path / "baseline.json").write_text("{")
    alerting = make(tmp_path, registry)
    service.respond(alerting.sink, service.rows(24))
    evaluator = alerting.state()["evaluator"]
    assert "not a baseline" in evaluator["baseline_error"]
    assert "qa" in evaluator["blind"]


def test_unknown_preset_and_bad_rules_are_refused(tmp_path: Path, registry) -> None:
    with pytest.raises(RulesError, match="no preset 'loud'; the rules have: quantile, raw"):
        make(tmp_path, registry, alert_preset="loud")
    with pytest.raises(RulesError, match="cannot read"):
        make(tmp_path, CollectorRegistry(), rules_file=tmp_path / "none.yaml")


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUAVER_BREAKER", "enforce")
    monkeypatch.setenv("QUAVER_ALERTMANAGER_URL", "http://am:9093")
    monkeypatch.setenv("QUAVER_ALERT_PRESET", "raw")
    settings = AlertingSettings()
    assert (settings.breaker, settings.alertmanager_url, settings.alert_preset) == (
        "enforce",
        "http://am:9093",
        "raw",
    )


async def test_a_failing_pass_leaves_the_heartbeat_stale_and_the_loop_alive(
    tmp_path, registry, service, caplog, monkeypatch
) -> None:
    alerting = make(tmp_path, registry, alert_tick_s=0.01)
    service.respond(alerting.sink, np.ones((3, len(TOKEN_SIGNALS)), dtype=np.float32))
    monkeypatch.setattr(alerting.gate, "tick", lambda: 1 / 0)
    await alerting.start()
    await asyncio.sleep(0.05)
    assert registry.get_sample_value("quaver_evaluator_heartbeat_seconds") == 0
    monkeypatch.undo()
    await asyncio.sleep(0.05)
    assert (registry.get_sample_value("quaver_evaluator_heartbeat_seconds") or 0) > 0
    await alerting.stop()
    assert "pass failed" in caplog.text


def test_detection_imports_no_chaos() -> None:
    import alerting

    for path in Path(alerting.__file__).parent.rglob("*.py"):
        text = path.read_text()
        assert "import chaos" not in text
        assert "from chaos" not in text
        assert "fault_ids" not in text
