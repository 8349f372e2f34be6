from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from alerting.alertmanager import AlertmanagerClient
from alerting.alerts import AlertBook
from alerting.metrics import AlertMetrics
from alerting.rules import Rules
from alerting.sink import EmbeddedSink
from alerting.store import NotificationStore
from alerting.webhook import WebhookReceiver


class Alertmanager:
    """An endpoint that answers like Alertmanager's v2 API, with troubles on demand."""

    def __init__(self) -> None:
        self.received: list[dict] = []
        self.troubles: list[int] = []
        self.refuses = ""
        self.app = Starlette(routes=[Route("/am/api/v2/alerts", self.post, methods=["POST"])])

    async def post(self, request: Request) -> Response:
        alerts = json.loads(await request.body())
        if self.troubles:
            return Response(status_code=self.troubles.pop(0))
        if any(a["labels"]["route"] == self.refuses for a in alerts):
            return Response(status_code=400)
        self.received += alerts
        return Response()


@pytest.fixture
def server() -> Alertmanager:
    return Alertmanager()


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
async def client(server: Alertmanager, registry: CollectorRegistry):
    client = AlertmanagerClient(
        "http://am.test/am/",
        AlertMetrics(registry),
        generator_url="http://q",
        resend_s=0.2,
        transport=httpx.ASGITransport(server.app),
    )
    await client.start()
    yield client
    await client.stop()


async def until(condition: Callable[[], object], seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - the conditions are plain state
            await asyncio.sleep(0.01)


def sent(registry: CollectorRegistry, result: str) -> float:
    return registry.get_sample_value("quaver_alerts_sent_total", {"result": result}) or 0


async def test_firing_is_repeated_and_resolved_is_sent(client, server, rules: Rules, registry) -> None:
    book = AlertBook(client.notify)
    book.raise_alert(
        rules.alerts.users_leaving, "qa", 1_700_000_000.0, {"interruptions_live": 4, "rate": 0.25}
    )
    await until(lambda: len(server.received) >= 3)
    first = server.received[0]
    assert (
        first["labels"] | {"alertname": "QuaverUsersLeaving", "route": "qa", "team": "sre"} == first["labels"]
    )
    assert first["annotations"]["interruptions_live"] == "4"
    assert first["startsAt"] == "2023-11-14T22:13:20.000Z"
    assert first["endsAt"] > first["startsAt"]
    assert first["generatorURL"] == "http://q/quaver/alerts"
    book.resolve(rules.alerts.users_leaving, "qa", 1_700_000_060.0, "well again")
    await until(lambda: server.received[-1]["endsAt"] == "2023-11-14T22:14:20.000Z")
    number = len(server.received)
    await asyncio.sleep(0.5)
    assert len(server.received) == number
    assert sent(registry, "sent") == number


async def test_server_errors_are_tried_again(client, server, rules, registry) -> None:
    server.troubles = [503, 500]
    AlertBook(client.notify).raise_alert(rules.alerts.l1_rate, "qa", 1.0, {})
    await until(lambda: server.received)
    assert sent(registry, "failed") == 2


async def test_one_refused_alert_keeps_no_other_back(client, server, rules, registry) -> None:
    server.refuses = "bad"
    book = AlertBook(client.notify)
    for route in ("a", "bad", "b"):
        book.raise_alert(rules.alerts.l1_rate, route, 1.0, {})
    await until(lambda: {a["labels"]["route"] for a in server.received} == {"a", "b"})
    await until(lambda: sent(registry, "rejected") == 1)
    assert client.report()["firing"] == 2


async def test_only_the_newest_state_waits(server, rules, registry) -> None:
    client = AlertmanagerClient(
        "http://am.test/am",
        AlertMetrics(registry),
        generator_url="",
        transport=httpx.ASGITransport(server.app),
    )
    book = AlertBook(client.notify)
    book.raise_alert(rules.alerts.l1_rate, "qa", 1.0, {})
    book.resolve(rules.alerts.l1_rate, "qa", 2.0, "over")
    await client.start()
    await until(lambda: server.received)
    await client.stop()
    assert [a["endsAt"] for a in server.received] == ["1970-01-01T00:00:02.000Z"]


async def test_an_absent_alertmanager_blocks_nothing_and_is_reported(
    rules, registry, unused_port: int
) -> None:
    client = AlertmanagerClient(
        f"http://127.0.0.1:{unused_port}", AlertMetrics(registry), generator_url="", resend_s=0.2
    )
    await client.start()
    book = AlertBook(client.notify)
    for i in range(1200):
        book.raise_alert(rules.alerts.l1_rate, f"r{i}", 1.0, {})
    await until(lambda: client.report()["problem"])
    assert "ConnectError" in client.report()["problem"]
    assert sent(registry, "dropped") == 200
    await asyncio.wait_for(client.stop(), 4)


def notification(**changes: object) -> dict:
    alert = {
        "status": "firing",
        "labels": {"alertname": "X", "route": "qa"},
        "annotations": {"summary": "s"},
        "startsAt": "2026-01-01T00:00:00Z",
        "endsAt": "0001-01-01T00:00:00Z",
        "generatorURL": "",
        "fingerprint": "f1",
        "somethingNew": {"a": 1},
    } | changes
    return {
        "version": "4",
        "groupKey": "{}",
        "truncatedAlerts": 0,
        "status": "firing",
        "receiver": "quaver-sre",
        "groupLabels": {},
        "commonLabels": {},
        "commonAnnotations": {},
        "externalURL": "",
        "notificationReason": "new field",
        "alerts": [alert],
    }


@pytest.fixture
def store(tmp_path: Path) -> NotificationStore:
    return NotificationStore(tmp_path / "alerts.jsonl", 1_000_000)


@pytest.fixture
async def hook(store: NotificationStore):
    receiver = WebhookReceiver(store)
    app = Starlette(routes=[Route("/hook", receiver.handle, methods=["POST"])])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://t") as http:
        http.receiver = receiver  # type: ignore[attr-defined]
        yield http


async def test_webhook_stores_each_state_once(hook, store, tmp_path: Path) -> None:
    for changes in (
        {},
        {},
        {"status": "resolved"},
        {"status": "resolved"},
        {"startsAt": "2026-01-02T00:00:00Z"},
    ):
        assert (await hook.post("/hook", json=notification(**changes))).status_code == 200
    assert [n["status"] for n in store.recent()] == ["firing", "resolved", "firing"]
    assert store.duplicates == 2
    again = NotificationStore(tmp_path / "alerts.jsonl", 1_000_000)
    assert again.recent() == store.recent()
    assert not again.add(store.recent()[0])
    assert (tmp_path / "alerts.jsonl").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"{", 400),
        (b"[]", 400),
        (b'{"version":"4"}', 400),
        (b'{"version":"3","alerts":[]}', 400),
        (b'{"version":"4","x":' + b"[" * 50_000 + b"]" * 50_000 + b"}", 400),
        (b" " * (5 << 20), 413),
    ],
)
async def test_malformed_notifications_are_not_retried(hook, content: bytes, status: int) -> None:
    answer = await hook.post("/hook", content=content)
    assert answer.status_code == status
    assert answer.json()["error"]["code"]


def test_what_a_full_disk_took_of_a_line_is_cut_off_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = NotificationStore(tmp_path / "alerts.jsonl", 1_000_000)
    entries = [{"status": "firing", "labels": {}, "startsAt": str(i), "fingerprint": "f"} for i in range(3)]
    store.add(entries[0])
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda file, data: write(file, data[:20]))
        with pytest.raises(OSError, match="No space"):
            store.add(entries[1])
    assert store.add(entries[1])
    store.add(entries[2])
    assert NotificationStore(tmp_path / "alerts.jsonl", 1_000_000).recent() == entries[::-1]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
async def test_a_full_disk_asks_for_a_retry(tmp_path: Path) -> None:
    path = tmp_path / "alerts.jsonl"
    store = NotificationStore(path, 1_000_000)
    path.symlink_to("/dev/full")
    app = Starlette(routes=[Route("/hook", WebhookReceiver(store).handle, methods=["POST"])])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://t") as http:
        answer = await http.post("/hook", json=notification())
    assert answer.status_code == 503
    assert store.recent() == []


async def test_the_watchdog_is_heard_not_stored(hook, store) -> None:
    await hook.post("/hook", json=notification(labels={"alertname": "QuaverWatchdog"}))
    assert hook.receiver.watchdog_heard is not None
    assert store.recent() == []


def test_store_keeps_its_cap_and_the_newest(tmp_path: Path) -> None:
    path = tmp_path / "alerts.jsonl"
    store = NotificationStore(path, 4000)
    for i in range(200):
        store.add({"fingerprint": str(i), "startsAt": "t", "status": "firing", "labels": {}})
        assert path.stat().st_size <= 4000
    assert store.recent(1)[0]["fingerprint"] == "199"
    assert NotificationStore(path, 4000).recent(1)[0]["fingerprint"] == "199"


def test_store_survives_a_line_cut_off_by_a_crash(tmp_path: Path) -> None:
    path = tmp_path / "alerts.jsonl"
    store = NotificationStore(path, 10_000)
    store.add({"fingerprint": "1", "startsAt": "t", "status": "firing", "labels": {}})
    path.write_bytes(path.read_bytes() + b'{"fingerprint": "2", "sta')
    again = NotificationStore(path, 10_000)
    again.add({"fingerprint": "3", "startsAt": "t", "status": "firing", "labels": {}})
    assert [e["fingerprint"] for e in NotificationStore(path, 10_000).recent()] == ["3", "1"]


async def test_embedded_sink_tells_the_same_and_inhibits(store, rules, registry) -> None:
    sink = EmbeddedSink(WebhookReceiver(store), AlertMetrics(registry))
    book = AlertBook(sink.notify)
    alerts = rules.alerts
    book.raise_alert(alerts.users_leaving, "qa", 1.0, {"n": 1})
    book.raise_alert(alerts.l1_rate, "qa", 2.0, {})
    book.raise_alert(alerts.l1_rate, "chat", 2.0, {})
    book.resolve(alerts.l1_rate, "qa", 3.0, "over")
    book.resolve(alerts.users_leaving, "qa", 4.0, "over")
    told = [(n["labels"]["alertname"], n["labels"]["route"], n["status"]) for n in reversed(store.recent())]
    assert told == [
        ("QuaverUsersLeaving", "qa", "firing"),
        ("QuaverLowConfidenceRate", "chat", "firing"),
        ("QuaverUsersLeaving", "qa", "resolved"),
    ]
    assert store.recent()[0]["source"] == "embedded"
    assert store.recent()[0]["receiver"] == "quaver-sre"
    assert sent(registry, "inhibited") == 2
