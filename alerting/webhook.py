"""Receives Alertmanager's webhook (version 4). The server's middleware has checked the key.

Alertmanager retries 5xx answers only: what is malformed gets a 400 and is gone, what the disk
refuses a 503 and comes again. Fields not known here are accepted and ignored.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from alerting.alerts import rfc3339
from alerting.store import NotificationStore
from engine.api.body import body_of, decode
from engine.api.errors import ApiError

MAX_BODY = 4 * 1024 * 1024
WATCHDOG = "QuaverWatchdog"


class WebhookAlert(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One alert of a notification."""

    status: str
    labels: dict[str, str]
    annotations: dict[str, str] = {}
    starts_at: str
    ends_at: str | None = None
    generator_url: str | None = msgspec.field(default=None, name="generatorURL")
    fingerprint: str


class Notification(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What Alertmanager posts; `truncated_alerts` counts those it left out."""

    version: str
    receiver: str = ""
    group_key: str = ""
    truncated_alerts: int = 0
    alerts: list[WebhookAlert]


class WebhookReceiver:
    """The endpoint. The watchdog is not stored; the time it was last heard of is kept."""

    def __init__(self, store: NotificationStore, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._clock = clock
        self.watchdog_heard: float | None = None

    async def handle(self, request: Request) -> Response:
        """POST /quaver/alerts/webhook."""
        try:
            notification = decode(await body_of(request, MAX_BODY), Notification)
        except ApiError as error:
            return error.response()
        except ValueError as error:
            return _error(400, "bad_notification", f"not an Alertmanager notification: {error}")
        if notification.version != "4":
            return _error(400, "bad_version", f"version {notification.version!r} is not known here; send '4'")
        try:
            stored = self.receive(notification, "alertmanager")
        except OSError as error:
            return _error(503, "not_stored", f"the notification could not be written: {error.strerror}")
        return JSONResponse({"stored": stored, "received": len(notification.alerts)})

    def receive(self, notification: Notification, source: str) -> int:
        """Store what is new; return how many alerts were. Raises OSError."""
        stored = 0
        for alert in notification.alerts:
            if alert.labels.get("alertname") == WATCHDOG:
                self.watchdog_heard = self._clock()
                continue
            stored += self._store.add(self._entry(notification, alert, source))
        return stored

    def _entry(self, notification: Notification, alert: WebhookAlert, source: str) -> dict[str, Any]:
        return {
            "received": rfc3339(self._clock()),
            "source": source,
            "receiver": notification.receiver,
            **msgspec.to_builtins(alert),
        }


def _error(status: int, code: str, message: str) -> JSONResponse:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse(
        {"error": {"message": message, "type": kind, "param": None, "code": code}}, status_code=status
    )
