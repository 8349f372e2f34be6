"""Canaries on a real server: a fault they see, a control they do not, and what they stay out of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.quaver.server import Server, wait_for

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(tmp_path_factory.mktemp("canaries"), QUAVER_CANARY_EVERY_S="0.1", QUAVER_THREADS="2")
    yield running
    running.stop()


def state(server: Server) -> dict[str, Any]:
    return dict(server.call("GET", "/quaver/canaries", role="viewer").json())


def answered(server: Server, count: int, after: int) -> list[dict[str, Any]]:
    """Wait until `count` canaries more than `after` were judged and return these."""

    def found() -> list[dict[str, Any]] | None:
        recent = state(server)["recent"][::-1]
        return recent[after : after + count] if len(recent) >= after + count else None

    return wait_for(found)


def test_a_fault_pages_within_few_canaries_and_its_control_does_not(server: Server) -> None:
    before = state(server)
    assert not before["usable"] and "quaver calibrate" in before["why_not"]
    assert server.call("POST", "/quaver/canaries", {"action": "calibrate", "rounds": 2}).status_code == 400
    assert server.call("POST", "/quaver/canaries", {"action": "calibrate"}, role="client").status_code == 403
    started = server.call("POST", "/quaver/canaries", {"action": "calibrate", "rounds": 8})
    assert started.json()["calibration"]["running"]
    for path in ("/quaver/canaries", "/quaver/alerts/calibration"):
        action = "calibrate" if path.endswith("canaries") else "start"
        again = server.call("POST", path, {"action": action})
        assert (again.status_code, "--cancel" in again.text) == (409, True)
    wait_for(lambda: not state(server)["calibration"]["running"], 240)
    made = state(server)
    assert made["usable"], made["calibration"]
    assert all(trials for _, trials in made["baseline"]["failed_in_health"].values())

    server.chat(max_tokens=2)  # somebody to stand for
    control = server.start_fault("noise", sigma=0)
    healthy = answered(server, 8, len(state(server)["recent"]))
    assert {seen["cached"] for seen in healthy} == {True, False}
    assert sum(seen["tests"]["signals@0.05"] for seen in healthy) <= 3
    assert "QuaverCanary" not in firing(server)
    server.call("DELETE", f"/quaver/chaos/faults/{control}")

    server.start_fault("noise", sigma=3)
    struck = answered(server, 8, len(state(server)["recent"]) + 1)
    assert sum(seen["tests"]["signals@0.05"] for seen in struck) >= 7
    assert "QuaverCanary" in firing(server)
    assert {"tenant", "route", "evidence_log", "firing"} == set(state(server)["guarded"][0])
    server.call("POST", "/quaver/chaos/halt")


def test_they_stay_out_of_business_figures_and_of_detection(server: Server) -> None:
    text = httpx.get(f"{server.url}/metrics").text
    assert 'quaver_canary_answers_total{result="suspicious"' in text
    rows = server.call("GET", "/quaver/records/requests?limit=50", role="viewer").json()
    canaries = [row for row in rows if row["request_id"].startswith("canary-")]
    assert canaries and all(row["canary"] for row in canaries)
    alerts = server.call("GET", "/quaver/alerts", role="viewer").json()
    assert not {event.get("request_id") for event in alerts["events"]} & {c["request_id"] for c in canaries}


def firing(server: Server) -> set[str]:
    alerts = server.call("GET", "/quaver/alerts", role="viewer").json()
    return {alert["name"] for alert in alerts["active"]}
