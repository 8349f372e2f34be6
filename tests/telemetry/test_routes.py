from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.testclient import TestClient
from starlette.types import ASGIApp, Receive, Scope, Send

from telemetry.hub import Telemetry

from .conftest import START, Events


@dataclass
class Principal:
    role: str
    tenant: str


class Who:
    """Stands where the API's key check stands: the tenant is in a header."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tenant = dict(scope.get("headers", [])).get(b"x-tenant")
        if tenant:
            scope.setdefault("state", {})["principal"] = Principal("client", tenant.decode())
        await self.app(scope, receive, send)


@pytest.fixture
def client(telemetry: Telemetry) -> Iterator[TestClient]:
    with TestClient(Starlette(routes=telemetry.routes(), middleware=[Middleware(Who)])) as client:
        yield client


def give(client: TestClient, tenant: str | None = "acme", **body: Any) -> tuple[int, Any]:
    answer = client.post("/v1/feedback", json=body, headers={"x-tenant": tenant} if tenant else {})
    return answer.status_code, answer.json()


def test_metrics_negotiates_its_format(client: TestClient, telemetry: Telemetry, events: Events) -> None:
    events.run(telemetry)
    plain = client.get("/metrics")
    assert plain.headers["content-type"].startswith("text/plain; version=")
    rich = client.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert rich.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert rich.text.endswith("# EOF\n")
    assert "trace_id=" in rich.text


def test_records(client: TestClient, telemetry: Telemetry, events: Events) -> None:
    nan = np.full((1, 7), np.nan)
    meta = events.meta("odd", route="qa")
    telemetry.on_started(events.started(meta))
    telemetry.on_step(events.step([("odd", 0)], 0, nan, detail=[0]))
    telemetry.on_ended(events.ended(meta, aggregates={"broken": float("nan"), "worse": float("-inf")}))
    events.clock.now += 1
    events.run(telemetry, "r2")
    listed = client.get("/quaver/records/requests")
    assert [row["request_id"] for row in listed.json()] == ["r2", "odd"]
    assert listed.json()[1]["aggregates"] == {"broken": None, "worse": None}
    assert [row["request_id"] for row in client.get("/quaver/records/requests?route=qa").json()] == ["odd"]
    assert len(client.get("/quaver/records/requests?limit=1").json()) == 1
    assert client.get(f"/quaver/records/requests?since={START + 5}").json() == []
    for since, count in (("-1e300", 2), ("1e15", 0), ("1e300", 0)):
        assert len(client.get(f"/quaver/records/requests?since={since}").json()) == count
    detail = client.get("/quaver/records/requests/odd").json()
    assert detail["tokens"]["confidence"] == [None]
    assert detail["layers"]["rows"][0]["sink_mass"] == [[12, 13], [14, 15], [16, 17]]
    assert detail["spans"][0]["name"] == "chat tiny"
    assert detail["spans"][1]["parent"] == detail["spans"][0]["span_id"]


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/quaver/records/requests?limit=many", 400),
        ("/quaver/records/requests?since=nan", 400),
        ("/quaver/records/requests/none", 404),
        ("/quaver/live?seconds=inf", 400),
    ],
)
def test_errors_are_shaped_like_openai(client: TestClient, path: str, status: int) -> None:
    answer = client.get(path)
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_live(client: TestClient, telemetry: Telemetry, events: Events) -> None:
    events.run(telemetry)
    got = client.get("/quaver/live?seconds=5").json()
    assert len(got["time"]) == 5
    assert got["series"]["requests"] == [None, None, None, None, 1]
    assert len(client.get("/quaver/live").json()["time"]) == 300


def test_feedback_counts_once(client: TestClient, telemetry: Telemetry, events: Events) -> None:
    events.run(telemetry, "r1", meta={"tenant": "acme"})
    first = give(client, request_id="r1", kind="rating", rating=0.5)
    again = give(client, request_id="r1", kind="rating", rating=-1)
    assert first[0] == 200
    assert first == again
    assert give(client, request_id="r1", kind="completed")[0] == 200
    value = telemetry.registry.get_sample_value
    assert value("quaver_feedback_total", {"route": "default", "kind": "rating"}) == 1
    assert value("quaver_feedback_total", {"route": "default", "kind": "completed"}) == 1


def test_feedback_is_the_owners_alone(client: TestClient, telemetry: Telemetry, events: Events) -> None:
    events.run(telemetry, "r1", meta={"tenant": "acme"})
    other = give(client, "rival", request_id="r1", kind="completed")
    unknown = give(client, "rival", request_id="r0", kind="completed")
    assert other[0] == 404
    assert other == unknown
    assert give(client, None, request_id="r1", kind="completed")[0] == 401
    assert (
        telemetry.registry.get_sample_value(
            "quaver_feedback_total", {"route": "default", "kind": "completed"}
        )
        is None
    )


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"request_id": "r1"},
        {"request_id": "r1", "kind": "shout"},
        {"request_id": "r1", "kind": "rating"},
        {"request_id": "r1", "kind": "rating", "rating": 1.5},
        {"request_id": "r1", "kind": "completed", "rating": 1},
        {"request_id": "r1", "kind": "completed", "extra": 1},
    ],
)
def test_bad_feedback_is_refused(client: TestClient, body: dict[str, Any]) -> None:
    assert give(client, **body)[0] == 400


def test_feedback_bodies_are_bounded(client: TestClient) -> None:
    assert give(client, request_id="x" * 5000, kind="completed")[0] == 413
    headers = {"x-tenant": "acme"}
    for body in (b"\xff{", b"[" * 2000):
        assert client.post("/v1/feedback", content=body, headers=headers).status_code == 400


def test_feedback_memory_is_bounded(make: Callable[..., Telemetry], events: Events) -> None:
    telemetry = make(feedback_kept=2)
    for number in range(4):
        events.run(telemetry, f"r{number}", tokens=1)
    assert telemetry.business.find("r1") is None
    assert telemetry.business.find("r3") is not None
