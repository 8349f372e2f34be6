"""The embedded sink: without an Alertmanager, notifications take the webhook's way in process."""

from __future__ import annotations

import asyncio
from typing import Any

from alerting.alerts import Alert
from alerting.metrics import AlertMetrics
from alerting.tasks import end
from alerting.webhook import Notification, WebhookAlert, WebhookReceiver

_MAX_WAITING = 1000
_RETRY_S = 1.0


class EmbeddedSink:
    """A Notifier that hands over the same shape as Alertmanager, with the same inhibition.

    An L1 is not notified while an L2 of its route fires; its end is told only if its start was.
    """

    def __init__(self, receiver: WebhookReceiver, metrics: AlertMetrics) -> None:
        self._receiver = receiver
        self._metrics = metrics
        self._told: set[str] = set()
        self._paging: dict[str, str] = {}  # key of a firing L2 -> route
        self._waiting: list[Alert] = []
        self._task: asyncio.Task[None] | None = None

    def notify(self, alert: Alert) -> None:
        """Deliver now, or wait for the disk."""
        key = alert.fingerprint + alert.starts_at
        if alert.level == "L2":
            if alert.state == "firing":
                self._paging[key] = alert.route
            else:
                self._paging.pop(key, None)
        if self._inhibited(alert, key):
            self._metrics.sent.labels("inhibited").inc()
            return
        if alert.state == "firing":
            self._told.add(key)
        else:
            self._told.discard(key)
        self._waiting.append(alert)
        self._deliver()

    async def start(self) -> None:
        """Begin retrying what the disk refused."""
        self._task = asyncio.create_task(self._retry(), name="embedded-sink")

    async def stop(self) -> None:
        """Try once more, then end."""
        if self._task is not None:
            await end(self._task)
            self._task = None
        self._deliver()

    def report(self) -> dict[str, Any]:
        """Return where alerts go and what waits."""
        return {"to": "embedded", "waiting": len(self._waiting)}

    def _inhibited(self, alert: Alert, key: str) -> bool:
        if alert.level == "L2":
            return False
        if alert.state == "resolved":
            return key not in self._told
        return alert.route in self._paging.values()

    async def _retry(self) -> None:
        while True:
            await asyncio.sleep(_RETRY_S)
            self._deliver()

    def _deliver(self) -> None:
        while self._waiting:
            try:
                self._receiver.receive(_notification(self._waiting[0]), "embedded")
            except OSError:
                self._metrics.sent.labels("failed").inc()
                dropped = len(self._waiting) - _MAX_WAITING
                if dropped > 0:
                    del self._waiting[:dropped]
                    self._metrics.sent.labels("dropped").inc(dropped)
                return
            self._waiting.pop(0)
            self._metrics.sent.labels("sent").inc()


def _notification(alert: Alert) -> Notification:
    return Notification(
        version="4",
        receiver=f"quaver-{alert.team}",
        alerts=[
            WebhookAlert(
                status=alert.state,
                labels=alert.labels,
                annotations=alert.annotations,
                starts_at=alert.starts_at,
                ends_at=alert.ends_at,
                fingerprint=alert.fingerprint,
            )
        ],
    )
