"""Sends alerts to an Alertmanager by its v2 API, without ever making the event loop wait.

Firing alerts are sent again and again with an end in the near future: when this process dies they
end by themselves. Of each alert only the newest state is kept, so the queue is bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

import httpx

from alerting.alerts import Alert, rfc3339
from alerting.metrics import AlertMetrics
from alerting.tasks import end

_MAX_PENDING = 1000
_RETRY_MIN_S, _RETRY_MAX_S = 0.5, 30.0
_LIFE = 4  # a firing alert outlives so many missed repetitions
_STOP_S = 2.0


class AlertmanagerClient:
    """A Notifier that posts to `<url>/api/v2/alerts`."""

    def __init__(
        self,
        url: str,
        metrics: AlertMetrics,
        *,
        generator_url: str,
        resend_s: float = 15.0,
        timeout_s: float = 5.0,
        transport: httpx.AsyncBaseTransport | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._url = url.rstrip("/") + "/api/v2/alerts"
        self._metrics = metrics
        self._generator_url = generator_url
        self._resend_s = resend_s
        self._clock = clock
        self._http = httpx.AsyncClient(timeout=timeout_s, transport=transport)
        self._firing: dict[str, Alert] = {}
        self._due: dict[str, Alert] = {}  # to be sent now: newest state by (fingerprint, start)
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._failures = 0
        self._problem: str | None = None

    def notify(self, alert: Alert) -> None:
        """Send this state soon; the oldest waiting alert goes when too many wait."""
        key = alert.fingerprint + alert.starts_at
        if alert.state == "firing":
            self._firing[key] = alert
        else:
            self._firing.pop(key, None)
        self._due.pop(key, None)
        self._due[key] = alert
        if len(self._due) > _MAX_PENDING:
            del self._due[next(iter(self._due))]
            self._count("dropped")
        self._wake.set()

    async def start(self) -> None:
        """Begin delivering."""
        self._task = asyncio.create_task(self._run(), name="alertmanager")

    async def stop(self) -> None:
        """Try once more to deliver what waits, then end."""
        if self._task is not None:
            await end(self._task)
            self._task = None
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._deliver(), _STOP_S)
        await self._http.aclose()

    def report(self) -> dict[str, Any]:
        """Return where alerts go and what waits."""
        return {
            "to": self._url,
            "waiting": len(self._due),
            "firing": len(self._firing),
            "problem": self._problem,
        }

    async def _run(self) -> None:
        """Deliver what is new at once, what failed after a growing pause, what fires every `resend_s`."""
        repeat_at = time.monotonic() + self._resend_s
        while True:
            if self._failures:
                await asyncio.sleep(min(_RETRY_MAX_S, _RETRY_MIN_S * 2 ** (self._failures - 1)))
            else:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), max(0.0, repeat_at - time.monotonic()))
            self._wake.clear()
            if time.monotonic() >= repeat_at:
                self._due = self._firing | self._due
                repeat_at = time.monotonic() + self._resend_s
            await self._deliver()

    async def _deliver(self) -> None:
        batch, self._due = self._due, {}
        if not batch:
            self._failures = 0
            return
        try:
            status = await self._post(list(batch.values()))
            if status == httpx.codes.BAD_REQUEST and len(batch) > 1:
                await self._deliver_singly(batch)
                return
        except httpx.HTTPError as error:
            self._postpone(batch, f"{type(error).__name__}: {error}")
            return
        except asyncio.CancelledError:
            self._due = batch | self._due
            raise
        self._settle(batch, status)

    async def _deliver_singly(self, batch: dict[str, Alert]) -> None:
        """One bad alert must not keep the others back: Alertmanager may have stored only part."""
        for key, alert in batch.items():
            try:
                self._settle({key: alert}, await self._post([alert]))
            except httpx.HTTPError as error:
                self._postpone({key: alert}, f"{type(error).__name__}: {error}")

    def _settle(self, batch: dict[str, Alert], status: int) -> None:
        if status >= httpx.codes.INTERNAL_SERVER_ERROR or status == httpx.codes.TOO_MANY_REQUESTS:
            self._postpone(batch, f"HTTP {status}")
            return
        self._failures = 0
        accepted = status < httpx.codes.BAD_REQUEST
        self._problem = None if accepted else f"HTTP {status}: not accepted"
        if not accepted:
            for key in batch:
                self._firing.pop(key, None)
        self._count("sent" if accepted else "rejected", len(batch))

    def _postpone(self, batch: dict[str, Alert], problem: str) -> None:
        self._failures = min(self._failures + 1, 16)
        self._problem = problem
        self._due = batch | self._due
        self._count("failed", len(batch))

    async def _post(self, alerts: list[Alert]) -> int:
        until = rfc3339(self._clock() + _LIFE * self._resend_s)
        body = [
            {
                "labels": alert.labels,
                "annotations": alert.annotations,
                "startsAt": alert.starts_at,
                "endsAt": alert.ends_at or until,
                "generatorURL": f"{self._generator_url}/quaver/alerts",
            }
            for alert in alerts
        ]
        return (await self._http.post(self._url, json=body)).status_code

    def _count(self, result: str, number: int = 1) -> None:
        self._metrics.sent.labels(result).inc(number)
