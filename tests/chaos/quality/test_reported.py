from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.testclient import TestClient

from chaos.quality.intervals import rate
from chaos.quality.reported import KEPT_S, Reported

RATE = {"n": 10, "good": 9, "rate": 0.9, "low": 0.6, "high": 0.98}


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def client(registry: CollectorRegistry, clock: Clock) -> TestClient:
    return TestClient(Starlette(routes=Reported(registry, "staging", clock).routes()))


def test_a_report_becomes_metrics_for_an_hour(
    client: TestClient, registry: CollectorRegistry, clock: Clock
) -> None:
    def accuracy() -> float | None:
        return registry.get_sample_value("prompt_accuracy", {"env": "staging"})

    assert accuracy() is None
    answer = client.post(
        "/quaver/quality", json={"rates": {"facts": RATE, "role": RATE}, "prompt_accuracy": 0.9}
    )
    assert (answer.status_code, answer.json()["env"], answer.json()["reported"]) == (201, "staging", 1000.0)
    assert accuracy() == 0.9
    found = registry.get_sample_value("quaver_quality_rate", {"env": "staging", "probe": "role"})
    assert found == 0.9
    assert registry.get_sample_value("quaver_quality_reported_seconds") == 1000.0
    clock.now += KEPT_S + 1
    assert accuracy() is None
    assert client.get("/quaver/quality").json()["report"]["rates"]["facts"] == RATE


def test_what_was_not_asked_has_no_series(client: TestClient, registry: CollectorRegistry) -> None:
    nothing = {"n": 0, "good": 0, "rate": None, "low": None, "high": None}
    assert client.post("/quaver/quality", json={"rates": {"facts": nothing}}).status_code == 201
    assert registry.get_sample_value("prompt_accuracy", {"env": "staging"}) is None
    assert registry.get_sample_value("quaver_quality_rate", {"env": "staging", "probe": "facts"}) is None
    assert rate([], []).rate is None


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"rates": {"speed": RATE}},
        {"rates": {"facts": RATE | {"rate": 1.5}}},
        {"rates": {"facts": RATE | {"rate": "high"}}},
        {"rates": {}, "prompt_accuracy": 92.5},
        {"rates": {}, "prompt_accuracy": -0.1},
        {"rates": {}, "accuracy": 0.9},
        [],
    ],
)
def test_bad_reports_are_refused_and_change_nothing(
    body: Any, client: TestClient, registry: CollectorRegistry
) -> None:
    answer = client.post("/quaver/quality", json=body)
    assert answer.status_code == 400 and answer.json()["error"]["message"]
    assert client.get("/quaver/quality").json() == {"env": "staging", "reported": None, "report": None}


def test_bodies_are_bounded(client: TestClient) -> None:
    assert client.post("/quaver/quality", content=b"x" * 20_000).status_code in (400, 413)
